"""Read nsys reports with sqlite3 and pyarrow alone, for comparisons."""

import sqlite3
import struct
from collections import defaultdict
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm.synthetic import play
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant

SMALL = Job.of(8, steps=2, micro_batches=2, layers=1)  # tp 2, pp 2, dp 2, ep 2
ELEMENT = {"BFloat16": 2, "Float": 4, "Long": 8}
KERNEL, COPY, MEMSET, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME")
)
NVTX, GRAPH_TRACE = "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COMM, SIZE, PEER = "NCCL communicator ID", "Message size [bytes]", "Peer rank"


def read_sqlite(path):
    """Every table as a list of rows, unsigned numbers as they are."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        return {
            name: [dict(row) for row in database.execute(f'SELECT * FROM "{name}"')]
            for name in names
        }


def bytes_of_text(table):
    """The table with bytes where nsys says text but means bytes."""
    if "binaryData" not in table.column_names:
        return table
    place = table.column_names.index("binaryData")
    return table.set_column(place, "binaryData", table["binaryData"].cast(pa.binary()))


def read_directory(path):
    found = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".arrow":
            with pa.ipc.open_stream(file) as stream:
                table = stream.read_all()
        else:
            table = pq.read_table(file)
        found[file.stem] = bytes_of_text(table).to_pylist()
    return found


class Report:
    """One report, and the questions that the tests have."""

    def __init__(self, path):
        self.tables = read_sqlite(path) if path.is_file() else read_directory(path)
        self.strings = {row["id"]: row["value"] for row in self.tables["StringIds"]}
        session = self.tables.get("TARGET_INFO_SESSION_START_TIME")
        self.utc = session[0]["utcEpochNs"] if session else None

    def rows(self, table, process=None):
        found = self.tables.get(table, [])
        if process is None:
            return found
        key = "globalPid" if found and "globalPid" in found[0] else "globalTid"
        return [row for row in found if row[key] >> 24 == process]

    @property
    def processes(self):
        return sorted({row["globalPid"] >> 24 for row in self.rows(KERNEL)})

    def name(self, row):
        return row["text"] if row["text"] is not None else self.strings[row["textId"]]

    def nccl_domain(self, process):
        (row,) = [
            row
            for row in self.rows(NVTX, process)
            if row["eventType"] == 75 and self.name(row) == "NCCL"
        ]
        return row["domainId"]

    def ranges(self, process):
        """Complete push/pop ranges of a process, by thread, in order of start."""
        found = defaultdict(list)
        for row in self.rows(NVTX, process):
            if row["eventType"] == 59 and row["end"] is not None:
                found[row["globalTid"]].append(row)
        return {
            thread: sorted(rows, key=lambda row: (row["start"], -row["end"]))
            for thread, rows in found.items()
        }

    def nccl(self, process):
        domain = self.nccl_domain(process)
        rows = [row for rows in self.ranges(process).values() for row in rows]
        return [row for row in rows if row["domainId"] == domain]

    def decode(self, row):
        """A blob's fields, through the schema tables."""
        domain, schema, size, _ = struct.unpack_from("<4Q", row["binaryData"])
        assert len(row["binaryData"]) == 32 + size
        entries = {
            (entry["name"], entry["type"], entry["offset"] or 0)
            for entry in self.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES")
            if (entry["domainId"], entry["schemaId"]) == (domain, schema)
        }
        assert entries
        return {
            name: struct.unpack_from(
                "<Q" if type_ in {18, 22} else "<i", row["binaryData"], 32 + offset
            )[0]
            for name, type_, offset in entries
        }


def written(tmp_path, job=SMALL, variant=None, **options):
    return [
        Report(path)
        for path in write_nsys(job, tmp_path, variant=variant or NsysVariant(), **options)
    ]


def of_ranks(reports):
    """(rank, report, process) of all, the processes in order of their ids."""
    pairs = [(report, process) for report in reports for process in report.processes]
    return [(rank, *pair) for rank, pair in enumerate(pairs)]


def calls(job, rank):
    return [work for step in play.steps(job, rank) for work in step.works if work.call]


def owned(report, process):
    """(name of the owner, payloads) of every kernel of NCCL, by the rule of groups."""
    launches = {
        row["correlationId"]: row
        for row in report.rows(RUNTIME, process)
        if report.strings[row["nameId"]].startswith("cudaLaunchKernelExC")
    }
    kernels = sorted(report.rows(KERNEL, process), key=lambda row: row["start"])
    domain = report.nccl_domain(process)
    groups = []  # thread, start, end, name, payloads
    for thread, rows in report.ranges(process).items():
        depth, collected = 0, []
        for row in rows:
            name = report.name(row)
            if row["domainId"] != domain or name.startswith("ncclComm"):
                continue
            if name == "ncclGroupStart":
                depth += 1
            elif name == "ncclGroupEnd":
                depth -= 1
                if not depth:
                    groups.append((thread, row["start"], row["end"], name, collected))
                    collected = []
            elif depth:
                collected.append((name, report.decode(row)))
            else:
                own = [(name, report.decode(row))]
                groups.append((thread, row["start"], row["end"], name, own))
    found = []
    for kernel in kernels:
        launch = launches.get(kernel["correlationId"])
        if launch:
            (owner,) = [
                group
                for group in groups
                if group[0] == launch["globalTid"]
                and group[1] <= launch["start"]
                and launch["end"] <= group[2]
            ]
            found.append((kernel, owner[3], owner[4]))
    return found


def nests(rows):
    """Whether ranges in order of start enclose each other, or do not touch."""
    stack = []
    for row in rows:
        while stack and stack[-1] <= row["start"]:
            stack.pop()
        if stack and row["end"] > stack[-1]:
            return False
        stack.append(row["end"])
    return True
