"""How often hypothesis tries where an example is expensive."""

from hypothesis import settings


def fewer(times):
    """Settings for that many times fewer examples than others have."""
    return settings(max_examples=max(settings.default.max_examples // times, 1))
