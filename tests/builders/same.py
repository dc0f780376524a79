"""Compare two trees of results."""

import math


def same(found, wanted, where=""):
    """Whether `found` holds all of `wanted`: exactly, or to 12 digits where it is a float."""
    if where == ".windows":
        found, wanted = (
            sorted(rows, key=lambda row: (row["from"], row["to"])) for rows in (found, wanted)
        )
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert key in found, f"{where}: no {key}"
            same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), f"{where}: {found} for {wanted}"
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}[{place}]")
    elif isinstance(wanted, float) and found is not None:
        close = math.isclose(found, wanted, rel_tol=1e-12, abs_tol=1e-15)
        assert close, f"{where}: {found} for {wanted}"
    else:
        assert found == wanted, f"{where}: {found!r} for {wanted!r}"
