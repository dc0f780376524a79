"""Small dPRO trials written from the format's rules: MXNet, TensorFlow 1; rings, trees."""

import json
from dataclasses import dataclass, field

SYMBOL = """\
Symbol Outputs:
\toutput[0]=fc2_fwd(0)
Variable:data
Variable:fc1_weight
Variable:fc1_bias
--------------------
Op:FullyConnected, Name=fc1_fwd
Inputs:
\targ[0]=data(0) version=0
\targ[1]=fc1_weight(0) version=0
\targ[2]=fc1_bias(0) version=0
Attrs:
\tnum_hidden=4
--------------------
Op:Activation, Name=relu1_fwd
Inputs:
\targ[0]=fc1_fwd(0)
Variable:fc2_weight
Variable:bn_moving_mean
--------------------
Op:FullyConnected, Name=fc2_fwd
Inputs:
\targ[0]=relu1_fwd(0)
\targ[1]=fc2_weight(0) version=0
\targ[2]=bn_moving_mean(0) version=0
"""
# The edges of that symbol, without communication and updates.
LOCAL = {
    ("I/O_data", "FW.fc1"),
    ("FW.fc1", "FW.relu1"),
    ("FW.relu1", "FW.fc2"),
    ("FW.fc2", "OUTPUT0"),
    ("OUTPUT0", "BW.fc2"),
    ("BW.fc2", "BW.relu1"),
    ("BW.relu1", "BW.fc1"),
}
GRADIENTS = [
    ["fc1_weight", "shape=(4, 3)", "dtype=<class 'numpy.float32'>"],
    "fc1_bias;shape=(4,);dtype=float16",
    ["fc2_weight", "shape=(2, 4)", "dtype=float32"],
]
# One step of the profiler: name, us, and what it is; + is more of the one before.
STEP = [
    ("FullyConnected{name=fc1_fwd;num_hidden=4}", 10, "FW.fc1"),
    ("FullyConnected{name=fc1_fwd;num_hidden=4}", 5, "+"),  # a piece of the same
    ("Reorder", 3, None),  # nobody's
    ("[relu1_fwd]{name=relu1_fwd;}", 4, "FW.relu1"),
    ("{name=fc2_fwd;}", 12, "FW.fc2"),
    ("SoftmaxOutput", 6, "OUTPUT0"),
    ("DeleteVariable", 1, "+"),
    ("{name=fc2_fwd_backward;}", 20, "BW.fc2"),
    ("{name=relu1_fwd_backward;}", 8, "BW.relu1"),
    ("{name=fc1_fwd_backward;}", 25, "BW.fc1"),
    ("dot", 4, "UPDATE_CAL"),
    ("Concat", 2, None),
    ("add_n", 3, "+"),
    ("sgd_mom_update", 5, "UPDATE_0"),
    ("dot", 1, None),  # too late for UPDATE_CAL
    ("SGD_Update", 5, "UPDATE_1"),
    ("sgd_mom_update", 5, "UPDATE_2"),
]
_GAP = 2
_LATE = 40  # what a step waits for communication before its updates
STEP_US = 400


@dataclass
class MadeRank:
    """What is written for a rank, and what reading it has to find: name, start, dur in us."""

    rows: list = field(default_factory=list)
    events: list = field(default_factory=list)
    ready: list = field(default_factory=list)  # when the gradients of each step are there


def mxnet_rank(begin, steps, *, pairs=True, slow=1):
    """Steps of a rank from `begin` on, and the begin of one more."""
    made = MadeRank()
    for step in range(steps + 1):
        at = begin + step * STEP_US
        made.rows += _op("Memcpy", at - 5, 1, pairs, pid=0)  # outside all operations
        for raw, usual, name in STEP if step < steps else STEP[:3]:
            dur = usual * slow
            if raw == "dot" and name:
                made.ready.append(at)
                at += _LATE
            made.rows += _op(raw, at, dur, pairs)
            if name == "+" and step < steps:
                made.events[-1][2] = at + dur - made.events[-1][1]
            elif name is not None and step < steps:
                made.events.append([name, at, dur])
            at += dur + _GAP
    return made


def _op(raw, at, dur, pairs, pid=0):
    row = {"name": raw, "pid": pid, "tid": 7, "cat": "operator"}
    if pairs:
        return [{**row, "ph": "B", "ts": at}, {**row, "ph": "E", "ts": at + dur}]
    return [{**row, "ph": "X", "ts": at, "dur": dur}]


def mxnet(
    folder, *, shape=(2, 1), steps=3, ahead=0, network="ring", aggregate=0, slice_us=1, **how
):
    """Write a trial of MXNet; the clock of each host but the first runs `ahead` us ahead."""
    made = {}
    hosts, gpus = shape
    world = hosts * gpus
    for rank in range(world):
        host, gpu = divmod(rank, gpus)
        place = folder / f"host{host}" / str(gpu)
        place.mkdir(parents=True)
        one = mxnet_rank(1000 + host * ahead, steps, **how)
        made[f"host{host}.rank{gpu}"] = one
        write(place / "temp.json", {"traceEvents": one.rows})
        write(place / "io.json", [{"ph": "X", "ts": 1, "dur": 2}, _io(1400 + host * ahead)])
        said = Comm(tensors=3, network=network, slice_us=slice_us)
        write_comm(place, rank, world, one.ready, said)
    first = folder / "host0" / "0"
    (first / "symbol_debug_str.txt").write_text(SYMBOL)
    metadata = {"gradient_name_list": GRADIENTS, "opt_aggregate_num": aggregate}
    write(first / "metadata.json", metadata)
    return made


def _io(ts):
    return {"ph": "X", "name": "I/O", "ts": ts, "dur": 7}


def write(path, said):
    path.write_text(json.dumps(said))


@dataclass
class Comm:
    """What is sent, and how: by a ring, a tree, or none that has files."""

    tensors: int
    network: str = "ring"
    process: str = "horovod_mxnet"
    slice_us: int = 1


def write_comm(place, rank, world, ready, said):
    """Horovod's timeline, NCCL's slices and its topology; `ready` is when each step's begin."""
    rows = [_process("Sync", 0)]
    rows += [_process(f"{said.process}.{t}", t + 1) for t in range(said.tensors)]
    detail = []
    for begin in ready:
        for t in range(said.tensors):
            at = begin + 10 * t
            rows += [_b("NEGOTIATE_ALLREDUCE", at, t + 1), _b(str(t), at, 0), _e(at + 2, 0)]
            rows += [_e(at + 2, t + 1), _b("ALLREDUCE", at + 2, t + 1)]
            rows += [_b("QUEUE", at + 2, t + 1), _e(at + 3, t + 1)]
            rows += [_b("NCCL_ALLREDUCE", at + 3, t + 1), _e(at + 9, t + 1), _e(at + 9, t + 1)]
            detail += _slices(t, at + 3, world, said.slice_us) if said.network == "ring" else []
    write(place / "comm.json", rows)
    if said.network == "none":
        return
    write(place / "comm_detail.json", {"traceEvents": detail})
    write(place / "nccl_rank_graph.json", topology(rank, world, said.network))


def _process(name, pid):
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _b(name, ts, pid):
    return {"ph": "B", "name": name, "ts": ts, "pid": pid}


def _e(ts, pid):
    return {"ph": "E", "ts": ts, "pid": pid}


def _slices(tensor, at, world, slice_us):
    """A SEND and a RECV of each chunk of a ring."""
    found = []
    for chunk in range(2 * (world - 1)):
        for sub_op in ("SEND", "RECV"):
            ids = {"loopId": 0, "channelId": 0, "chunkId": chunk, "sliceId": 0}
            name = f"Comm.{tensor}.{sub_op}"
            found.append(
                {"name": name, "pid": "comm_detail_r0_lr0", "ts": at + chunk, "dur": slice_us}
                | {"args": {"name": name, **ids}}
            )
    return found


def topology(rank, world, network):
    """nccl_rank_graph.json of a rank: a ring, or a binary tree by the numbers of the ranks."""
    if network == "ring":
        before, after = (rank - 1) % world, (rank + 1) % world
        hops = f"{before}[1a] -> {rank}[2b] [receive],{rank}[2b] -> {after}[1a] [send]"
        return {"RealRing": {"0": hops}}
    up = (rank - 1) // 2 if rank else -1
    down = [child if child < world else -1 for child in (2 * rank + 1, 2 * rank + 2)]
    below = "/".join(map(str, [*down, -1]))
    return {"Tree": {"-1": f"[0] {below}->{rank}->{up}|{up}->{rank}->{below}"}}


def tensorflow1(folder, *, steps=2, network="ring", host_name="host"):
    """Write a trial of TensorFlow 1 on two hosts; returns the operations, pieces joined."""
    names = ["x", "dense/MatMul", "gradients/dense/MatMul_grad"]
    comm, update = "Dist_Allreduce/HorovodAllreduce.0", "Momentum/update/Apply"
    chain = [*names, comm, update]
    nodes = "".join(f'node [ id {i} label "{n}" ]' for i, n in enumerate(chain))
    edges = "".join(f"edge [ source {i} target {i + 1} ]" for i in range(len(chain) - 1))
    labels = ["FW.x", "FW.dense/MatMul", "BW.gradients/dense/MatMul_grad", f"UPDATE_.{update}"]
    made = []
    for host in range(2):
        place = folder / f"{host_name}{host}" / "0"
        place.mkdir(parents=True)
        rows, ready, made = [], [], []
        for number, device in ((1, "device:GPU:0"), (2, "device:GPU:0/stream:all")):
            rows.append(_process(f"/job:localhost/replica:0/task:0/{device} Compute", number))
        for step in range(steps):
            at = 1000 + 500 * step
            for raw, label in zip([*names, update], labels, strict=True):
                if raw == update:
                    ready.append(at)
                    at += 30
                # What the host launches, and two kernels of the device.
                rows.append(_timeline(raw, at - 3, 2, 1))
                rows += [_timeline(raw, at, 5, 2), _timeline(raw, at + 6, 5, 2)]
                made.append([label, at, 11])
                at += 20
        write(place / "temp.json", {"traceEvents": rows})
        process = "Dist_Allreduce/HorovodAllreduce"
        said = Comm(tensors=1, network=network, process=process)
        write_comm(place, host, 2, ready, said)
    first = folder / f"{host_name}0" / "0"
    (first / "dag.gml").write_text(f"graph [ directed 1 {nodes} {edges} ]")
    write(first / "gradient_name2ID.json", {"gradients/dense/MatMul_grad:0": 0})
    output = {"name": "gradients/dense/MatMul_grad:0", "shape": [3, 5], "dtype": "float32"}
    write(first / "metadata.json", {names[2]: {"op": "MatMul", "output": [output]}})
    return made


def _timeline(raw, ts, dur, pid):
    args = {"name": raw, "op": raw.rpartition("/")[2]}
    return {"ph": "X", "cat": "Op", "name": args["op"], "pid": pid, "tid": 0, "args": args} | {
        "ts": ts,
        "dur": dur,
    }


def byteps(folder, *, steps=2, parts=(0, 1), late=1):
    """Write a trial of two workers that push tensor 0 to server 1; worker `late` last."""
    tensorflow1(folder, steps=steps, network="none", host_name="traces_")
    for place in folder.glob("*/0/comm.json"):
        place.unlink()
    links = [(f"worker_{w}", "server_1") for w in range(2)]
    number = {link: i for i, pair in enumerate(links) for link in (pair, pair[::-1])}
    number = {link: i for i, link in enumerate(number)}
    comm = [_process(f"{a} -> {b}", pid) for (a, b), pid in number.items()]
    server = [_process(f"server_1_t{part}", part) for part in parts]
    for step in range(-1, steps):  # the first push sets the tensor up
        for part in parts:
            name = f"gradients/dense/MatMul_grad:0~PART{part}"
            for w, (worker, there) in enumerate(links):
                at = 1060 + 500 * step + 3 * part + (2 if w == late else 0)
                to, back = number[worker, there], number[there, worker]
                pulls = () if step < 0 else ((12, to, "PULL", 1), (14, back, "PULL", 4))
                for more, pid, op, dur in ((0, to, "PUSH", 5), (6, back, "PUSH", 1), *pulls):
                    comm += [_b(f"{name}.{op}", at + more, pid), _e(at + more + dur, pid)]
            if step >= 0:
                for i, op in enumerate(("COPY_FIRST", "SUM", "COPY_MERGED")):
                    at = 1070 + 500 * step + 2 * i
                    server += [_b(f"{name}.{op}", at, part), _e(at + 1 + i, part)]
    write(folder / "comm_timeline.json", comm)
    write(folder / "server_timeline.json", server)
