"""Location and tolerances of the reference data of replays."""

import gzip
import json

from builders.shared_data import needs, path_of

FOLDER = path_of("replay")
TRIAL = FOLDER / "trial" / "trace"

TABLE = FOLDER / "straggler" / "trace-ST.parquet"
META = FOLDER / "straggler" / "meta-ST.yaml"
needed = needs("replay")


def document(name):
    """One JSON document of the reference data."""
    data = (FOLDER / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def assert_same(found, wanted, tolerance=1e-9, *, relative=False, place=""):
    """Equal structure, equal texts and counts, numbers within the tolerance."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), place
        for key in wanted:
            assert_same(
                found[key], wanted[key], tolerance, relative=relative, place=f"{place}/{key}"
            )
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), place
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, tolerance, relative=relative, place=f"{place}/{i}")
    elif isinstance(wanted, float):
        scale = abs(wanted) if relative else 1
        assert abs(found - wanted) <= tolerance * scale, (place, found, wanted)
    else:
        assert found == wanted, place
