"""How often hypothesis tries where an example is expensive."""

from hypothesis import settings


def fewer(times):
    """Settings for that many times fewer examples than others have."""
    return settings(max_examples=max(settings.default.max_examples // times, 1))


def in_gate(count):
    """Settings for `count` examples in the gate; `make soak` runs all of its own."""
    is_gate = settings.default.max_examples == settings.get_profile("gate").max_examples
    return settings(max_examples=count) if is_gate else settings()
