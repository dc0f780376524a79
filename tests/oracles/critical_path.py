"""HolisticTraceAnalysis' critical path by its definition: slow and obvious.

Times are microseconds. `analyze` takes a whole document, as `json.load` gives it.
"""

import re
from collections import defaultdict

from oracles.hta_trace import SYNCS, read, window

LOCKED = {"cudaHostAlloc", "cudaLaunchKernel", "cudaMemcpyAsync"}
BLOCKING = {
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
}
LAUNCHES = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemsetAsync",
    "hipMemcpyAsync",
    "hipMemcpyWithStream",
    "runFunction - job_prep_and_submit_for_execution",
}
OP, DEP, LAUNCH, KK, SYNC = (
    "OPERATOR_KERNEL",
    "DEPENDENCY",
    "KERNEL_LAUNCH_DELAY",
    "KERNEL_KERNEL_DELAY",
    "SYNC_DEPENDENCY",
)


class Graph:
    """Nodes and edges (sections 3 and 4); `edges[source, target] = [type, weight]`."""

    def __init__(self, full, clipped, data_load, zero_launches):
        self.full, self.clipped, self.zero_launches = full, clipped, zero_launches
        self.data_load = data_load
        self.by_id = {row.id: row for row in full}
        having = [row for row in clipped if self.has_nodes(row)]
        points = [(r.ts, r.id, 0) for r in having] + [(r.ts + r.dur, r.id, 1) for r in having]
        self.nodes = sorted(points)
        self.start = {id_: n for n, (_, id_, end) in enumerate(self.nodes) if not end}
        self.end = {id_: n for n, (_, id_, end) in enumerate(self.nodes) if end}
        self.edges, self.attributed = {}, {}
        self.parent = {}
        self.locks()
        self.merge_threads()
        self.stacks()
        self.device_edges()

    def has_nodes(self, row):
        return (
            row.cat in ("cpu_op", "cuda_runtime", "cuda_driver")
            or any(text in row.name for text in self.data_load)
            or (row.stream != -1 and row.ic >= 0)
        )

    def event(self, node):
        return self.by_id[self.nodes[node][1]]

    def is_start(self, node):
        return self.nodes[node][2] == 0

    def add(self, source, target, type_, weight=None, parent=None):
        full = self.nodes[target][0] - self.nodes[source][0]
        if type_ in (DEP, SYNC):
            full = 0
        self.edges[source, target] = [type_, full if weight is None else weight]
        if type_ == KK:
            self.attributed[source, target] = self.event(source).id
        elif type_ == OP:
            if self.is_start(source):
                owner = self.event(source).id
            elif not self.is_start(target):
                owner = self.event(target).id
            else:
                owner = parent
            self.attributed[source, target] = owner

    def locks(self):
        """Section 5."""
        opened, previous = [], None
        for node in range(len(self.nodes)):
            if self.event(node).name not in LOCKED:
                continue
            if self.is_start(node):
                opened.append(node)
            else:
                while opened:
                    popped = opened.pop()
                    same = self.event(popped) is self.event(node)
                    self.add(popped, node, OP if same else DEP)
                if previous is not None and not self.is_start(previous):
                    self.add(previous, node, DEP)
            previous = node

    def merge_threads(self):
        """Section 6.1."""
        rows = [row for row in self.clipped if row.cat in ("cpu_op", "user_annotation")]
        forward = {row.tid for row in rows if "forward" in row.name}
        backward = {row.tid for row in rows if "autograd" in row.name}
        self.thread = {row.id: row.tid for row in self.clipped}
        if len(forward) == len(backward) == 1 and forward != backward:
            (to,), (of,) = forward, backward
            if to != 0 and of != 0:
                self.thread |= {row.id: to for row in self.clipped if row.tid == of}

    def stacks(self):
        """Sections 6.2 to 6.4."""
        groups = defaultdict(list)
        for row in self.clipped:
            groups[row.pid, self.thread[row.id]].append(row)
        for key in sorted(groups, key=lambda key: [(isinstance(k, str), k) for k in key]):
            if all(row.stream < 0 for row in groups[key]):
                self.walk(groups[key])

    def walk(self, rows):
        points = []
        for row in rows:
            dur = max(row.dur, 0)
            points.append((row.ts, 1, -dur, row.id, row))
            points.append((row.ts + dur, 0, dur, -row.id, row))
        stack = []
        self.last = self.last_parent = None
        self.depth = 0
        for _, starts, _, _, row in sorted(points, key=lambda point: point[:4]):
            if starts:
                self.parent[row.id] = stack[-1].id if stack else -1
                stack.append(row)
                self.enter(row)
            else:
                self.leave(stack.pop())

    def shares(self, a, b):
        locked = self.event(a).name in LOCKED and self.event(b).name in LOCKED
        return locked and (self.is_start(a) or not self.is_start(b))

    def enter(self, row):
        node = self.start.get(row.id)
        if node is None:
            return
        if self.last is not None and not self.shares(self.last, node):
            self.add(self.last, node, OP if self.depth else DEP, parent=self.last_parent)
        self.last, self.last_parent = node, self.parent[row.id]
        self.depth += 1

    def leave(self, row):
        node = self.end.get(row.id)
        if node is None:
            return
        if self.last is not None and not self.shares(self.last, node):
            weight = 0 if row.name in BLOCKING else None
            self.add(self.last, node, OP, weight, self.last_parent)
        self.last, self.last_parent = node, self.parent[row.id]
        self.depth -= 1

    def queues(self):
        """Section 7: id -> queue length."""
        self.launches = [r for r in self.full if r.ic > 0 and r.name in LAUNCHES]
        known = {row.correlation for row in self.launches}
        device = [r for r in self.full if r.stream != -1 and r.correlation in known]
        points = [(r.ts, 0, r.id, self.by_id[r.ic].stream) for r in self.launches]
        points += [(row.ts, 1, row.id, row.stream) for row in device]
        total, queue = defaultdict(int), {}
        for _, starts, id_, stream in sorted(points):
            total[stream] += -1 if starts else 1
            queue[id_] = total[stream]
        return queue

    def records(self):
        """Section 8: correlation of a record -> launch before it; wait -> launch behind it."""
        launches = [r for r in self.launches if self.by_id[r.ic].ic > 0]
        launches.sort(key=lambda row: (row.ts, row.id))
        where = {}
        for row in self.full:
            if row.wait_stream > -1:
                where[row.wait_record] = (row.pid, row.wait_stream)
        previous, following = {}, {}
        records = [row for row in self.full if row.name == "cudaEventRecord"]
        for record in records:
            if record.correlation not in where:
                continue
            before = [
                row.id
                for row in launches
                if (self.by_id[row.ic].pid, self.by_id[row.ic].stream)
                == where[record.correlation]
                and row.ts <= record.ts
            ]
            previous[record.correlation] = before[-1] if before else -1
        for wait in self.full:
            if wait.name != "cudaStreamWaitEvent" or wait.ic <= 0 or not records:
                continue
            stream = self.by_id[wait.ic].stream
            behind = [
                row.id
                for row in launches
                if (row.pid, row.tid) == (wait.pid, wait.tid)
                and self.by_id[row.ic].stream == stream
                and row.ts > wait.ts
            ]
            following[wait.id] = behind[0] if behind else -1
        return previous, following

    def device_edges(self):
        """Section 9."""
        queue = self.queues()
        previous, following = self.records()
        self.queue, self.previous, self.following = queue, previous, following
        self.last_end, self.waits_for = {}, {}
        rows = [r for r in self.clipped if (r.stream != -1 or r.name in SYNCS) and r.ic >= 0]
        rows.sort(key=lambda r: (r.ts + (r.dur if r.cat == "cuda_sync" else 0), r.id))
        for row in rows:
            if row.cat == "cuda_sync":
                self.synchronize(row)
            elif row.id in self.start:
                self.kernel(row)

    def synchronize(self, row):
        call = self.end.get(row.ic)
        if row.name in ("Stream Wait Event", "Event Sync"):
            before = self.previous.get(row.wait_record, -1)
            if before == -1:
                return
            source = self.by_id[before].ic
            if row.name == "Event Sync":
                if source in self.end and call is not None:
                    self.add(self.end[source], call, SYNC)
            elif (launch := self.following.get(row.ic, -1)) >= 0:
                self.waits_for[self.by_id[launch].ic] = source
            return
        streams = [row.stream] if row.name == "Stream Sync" else list(self.last_end)
        for stream in streams:
            if stream in self.last_end and call is not None:
                self.add(self.last_end[stream], call, SYNC)

    def kernel(self, row):
        time = lambda node: self.nodes[node][0]  # noqa: E731
        start, end = self.start[row.id], self.end[row.id]
        self.add(start, end, OP)
        waited = self.end.get(self.waits_for.pop(row.id, None))
        if waited is not None:
            self.add(waited, start, SYNC)
        before, launch = self.last_end.get(row.stream), self.by_id.get(row.ic)
        launched = False
        if (
            launch is not None
            and self.queue.get(row.ic) == 1
            and self.queue.get(row.id) == 0
            and (before is None or time(before) < launch.ts)
            and (waited is None or time(waited) < launch.ts)
        ):
            launched = True
            if row.ic in self.start:
                self.add(self.start[row.ic], start, LAUNCH)
        elif (
            before is not None
            and time(start) - time(before) < 1500
            and (waited is None or time(waited) < time(before))
        ):
            self.add(before, start, KK)
        if self.zero_launches and not launched and row.ic in self.start:
            self.add(self.start[row.ic], start, LAUNCH, 0)
        self.last_end[row.stream] = end


def longest_path(graph):
    """Section 10.3 and 10.4: nodes from first to last; None where there is a cycle."""
    into, out = defaultdict(list), defaultdict(list)
    nodes = {}
    for (source, target), (_, weight) in graph.edges.items():
        into[target].append((source, 0 if weight <= -1 else weight))
        out[source].append(target)
        nodes[source] = nodes[target] = None
    missing = {node: len(into[node]) for node in nodes}
    order = [node for node in nodes if not missing[node]]
    for node in order:
        for target in out[node]:
            missing[target] -= 1
            if not missing[target]:
                order.append(target)
    if len(order) < len(nodes):
        return None
    best = {}
    for node in order:
        found = max(
            ((best[u][0] + weight, u) for u, weight in into[node]),
            key=lambda pair: pair[0],
            default=(0, node),
        )
        best[node] = found if found[0] >= 0 else (0, node)
    if not order:
        return []
    node = max(order, key=lambda node: best[node][0])
    path = [node]
    while best[node][1] != node:
        node = best[node][1]
        path.append(node)
    return path[::-1]


def is_valid(graph):
    """Section 10.2, but for cycles."""
    return all(
        type_ != SYNC
        or graph.event(u).stream != graph.event(v).stream
        or graph.event(u).stream == -1
        for (u, v), (type_, _) in graph.edges.items()
    )


def short_name(name):
    """Section 10.8."""
    if re.match(r"(hip)?Mem(cpy|set)|dma", name) or ("<" not in name and "(" not in name):
        return name
    stack = []
    for letter in name.replace("->", ""):
        if letter in ">)":
            opening = "<" if letter == ">" else "("
            while stack and stack.pop() != opening:
                pass
        else:
            stack.append(letter)
    return "".join(stack).split(" ")[-1]


def bound_by(graph, edge):
    """Section 10.7."""
    type_ = graph.edges[edge][0]
    if type_ == KK:
        return "gpu_kernel_kernel_overhead"
    if type_ == LAUNCH:
        return "gpu_kernel_launch_overhead"
    if type_ in (DEP, SYNC):
        return ""
    row = graph.by_id[graph.attributed[edge]]
    name = short_name(row.name)
    if row.stream == -1:
        loads = any(re.search(text, name) for text in graph.data_load)
        return "data_loading" if loads else "cpu_bound"
    is_comm = re.match(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)", name)
    return "gpu_communication_bound" if is_comm else "gpu_compute_bound"


def analyze(document, annotation, instance, data_load=(), zero_launches=False):
    """The graph, its longest path and how long each class is on it."""
    rows = read(document)
    graph = Graph(rows, window(rows, annotation, instance), data_load, zero_launches)
    graph.rows = rows
    path = longest_path(graph) if is_valid(graph) else None
    classes = defaultdict(int)
    for edge in zip(path or [], (path or [])[1:], strict=False):
        classes[bound_by(graph, edge)] += graph.edges[edge][1]
    return graph, path, dict(classes)
