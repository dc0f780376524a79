"""Cases of input that is easily read wrongly, and the checks that each states.

A case is a folder with files and an `expected.json`, which its README defines.
"""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
from builders.commands import invoke
from builders.shared_data import needs, path_of

FOLDER = path_of("cases")
needed = needs("cases")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]|\[([^=\]]+)=([^\]]*)\]")


def checks():
    """Every check, as the name of its case and its number; none where the cases are absent."""
    for path in sorted(FOLDER.glob("*/expected.json")):
        count = len(json.loads(path.read_text("utf-8"))["checks"])
        yield from ((path.parent.name, number) for number in range(count))


def problems(case, number, output):
    """Return what is wrong with the output of a check; `output` is a folder for tables."""
    folder = FOLDER / case
    check = json.loads((folder / "expected.json").read_text("utf-8"))["checks"][number]
    result = Result.of(check, folder, output)
    tolerance = check.get("tolerance", 1e-6)
    found = [*_unmet(check, result, tolerance)]
    accepted = [[*_unmet(way, result, tolerance)] for way in check.get("accept", [])]
    if accepted and all(accepted):
        found += [f"way {place}: {text}" for place, way in enumerate(accepted) for text in way]
    return found


class Result:
    """What a command printed and wrote."""

    def __init__(self, code, data, messages, output):
        """Keep the exit code, the JSON, all messages, and the folder of tables."""
        self.code = code
        self.data = data
        self.messages = messages
        self.output = output

    @classmethod
    def of(cls, check, folder, output):
        """Run the command of a check on the files in `folder`."""
        words = [folder / word if (folder / word).exists() else word for word in check["args"]]
        more = ("--output", output) if "rows" in json.dumps(check) else ()
        codes = {way.get("exit", check.get("exit", 0)) for way in check.get("accept", [check])}
        ran = invoke(check["command"], *words, "--json", *more, code=codes)
        data = json.loads(ran.stdout) if ran.exit_code == 0 else {}
        return cls(ran.exit_code, data, [*ran.stderr.splitlines(), *_messages(data)], output)


def _messages(data):
    """All texts of a result that tell a user something."""
    yield from filter(None, (data.get("headline"), (data.get("matching") or {}).get("note")))
    yield from (finding["text"] for finding in data.get("findings", []))
    yield from data.get("warnings", [])
    yield from map(str, data.get("unknown", []))


def _unmet(check, result, tolerance):
    """Yield what the result does not fulfill of a check, or of one way that is accepted."""
    if result.code != check.get("exit", 0) and ("exit" in check or "accept" not in check):
        yield f"exit code {result.code}, messages {result.messages}"
        return
    for path, wanted in check.get("expect", {}).items():
        value = value_at(result.data, path)
        if not fits(value, wanted, tolerance):
            yield f"{path} is {value}, wanted {wanted}"
    for table, columns in check.get("rows", {}).items():
        rows = pq.read_table(Path(result.output) / f"{table}.parquet").to_pydict()
        for column, wanted in columns.items():
            if (values := sorted(set(rows[column]), key=str)) != wanted:
                yield f"{table}.{column} has {values}, wanted {wanted}"
    yield from _unmet_messages(check, result.messages)


def _unmet_messages(check, messages):
    """Yield which expressions of a check are missing in the messages, or found."""

    def has(pattern, text):
        return re.search(pattern, text, re.IGNORECASE) is not None

    for pattern in check.get("message_contains", []):
        if not any(has(pattern, text) for text in messages):
            yield f"no message has {pattern!r}: {messages}"
    for pattern in check.get("message_excludes", []):
        yield from (
            f"a message has {pattern!r}: {text}" for text in messages if has(pattern, text)
        )
    patterns = check.get("one_message_contains", [])
    if not any(all(has(pattern, text) for pattern in patterns) for text in messages or [""]):
        yield f"no message has all of {patterns}: {messages}"


def value_at(data, path):
    """Return the value at a path: `a.b[0].c`, `list[key=value].c`, sums by `a.*.c`; or None."""
    for match in _STEP.finditer(path):
        name, index, key, value = match.groups()
        if data is None:
            return None
        if name == "*":
            inner = [value_at(each, path[match.end() + 1 :]) for each in data.values()]
            known = [number for number in inner if number is not None]
            return sum(known) if known else None
        if name is not None:
            data = data.get(name)
        elif index is not None:
            data = data[int(index)] if int(index) < len(data) else None
        else:
            data = next((row for row in data if str(row.get(key)) == value), None)
    return data


def fits(value, wanted, tolerance):
    """Return whether a value is what is wanted: a number, a range, a list, or equal."""
    if isinstance(wanted, dict):
        if value is None:
            return wanted.get("or_null", False)
        if "near" in wanted:
            return abs(value - wanted["near"]) <= wanted["within"]
        return wanted["min"] <= value <= wanted["max"]
    if isinstance(wanted, list):
        is_list = isinstance(value, list) and len(value) == len(wanted)
        return is_list and all(map(fits, value, wanted, [tolerance] * len(wanted)))
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        return value == wanted
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value - wanted) <= tolerance * max(1, abs(wanted))
