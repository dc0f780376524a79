# ruff: noqa: PLR0913, PLR0915, PLR0917
"""The price of one strategy by the definition: plain numbers, one formula after the other."""

from itertools import pairwise
from math import ceil, exp, gcd, log

GIB = 2**30
A800 = {
    "intra": 150 * GIB,
    "node": 100 * GIB,
    "hbm": 1.6e12,
    "alpha": (35e-6, 90e-6, 1.8e-6),
    "gemm": [
        *((2.5e8, 7.19), (1e9, 34.4), (4e9, 100), (1e10, 123), (3e10, 173), (1e11, 213)),
        *((3e11, 219), (1e12, 230), (2e12, 237), (3e12, 283), (5e12, 260), (1e13, 261)),
    ],
    "fa": ((80e-6, 0.56e-12, 212.3e12), (77e-6, 25.4e-12, 198.1e12)),
    "unfused": 150e12,
}


def width(hidden):
    return 256 * ceil(int(hidden * 8 / 3) / 256)


def model(
    h,
    a,
    layers,
    *,
    kv=None,
    f=None,
    vocab=103168,
    gelu=False,
    head=None,
    latent=None,
    experts=None,
    tied=False,
):
    """`experts`: number, of a token, width, width of shared, dense layers, nodes at most."""
    kv = kv or a
    f = f or (4 * h if gelu else width(h))
    usual = f == (4 * h if gelu else width(h))
    wide = (16.0 if gelu else 64 / 3) if usual else (4 if gelu else 8) * f / h
    if latent:
        q_rank, kv_rank, nope, rope, value = latent
        around = [h * q_rank, q_rank * a * (nope + rope), h * (kv_rank + rope)]
        around += [kv_rank * a * (nope + value), a * value * h]
        attended = a * (nope + rope + value) / 2
    else:
        rope = head or h // a
        attended = a * rope
        around = [h * (attended + 2 * kv * rope), attended * h]
    norms = 0 if gelu else 2 * h
    dense = [*around, *[h * f] * (2 if gelu else 3)]
    kinds = {"dense": (dense, sum(dense) + norms, wide)}
    number, top, each, shared, first, limit = experts or (0, 0, 0, 0, layers, 0)
    if experts:
        sparse = [*around, h * number, *([h * shared] * 3 if shared else [])]
        copies = 4 * top + 8 * top * each / h
        kinds["sparse"] = (sparse, sum(sparse) + norms, 8 * shared / h + copies)
    return {
        "h": h,
        "a": a,
        "kv": kv,
        "f": f,
        "V": vocab,
        "gelu": gelu,
        "e": vocab * h,
        "attended": attended,
        "rope": rope,
        "kinds": kinds,
        "layers": ["dense"] * first + ["sparse"] * (layers - first),
        "L": layers,
        "E": number,
        "top": top,
        "each": each,
        "shared": shared,
        "limit": limit,
        "tied": tied,
        "head": head,
        "latent": latent,
        "experts": experts,
    }


def stage_layers(mod, pp, place):
    """The layers of one stage: the last ones hold one more."""
    counts = [mod["L"] // pp + (each >= pp - mod["L"] % pp) for each in range(pp)]
    begin = sum(counts[:place])
    return mod["layers"][begin : begin + counts[place]]


def slow(n):
    for most, divisor in ((16, 1), (32, 1.1), (64, 1.2), (256, 1.3), (512, 1.4)):
        if n <= most:
            return divisor
    return 1.5


def collective(c, op, volume, n, stride, calls=1):
    if n <= 1:
        return 0.0
    inside = n <= 8 and (n - 1) * stride <= 7
    intra, inter, more = c["alpha"]
    start = calls * (intra if inside else inter + more * max(0, n - 16))
    if op == "a2a":
        if inside:
            return start + volume * (n - 1) / n / c["intra"]
        away = 8 * volume / n * (n - 8) / (c["node"] / slow(n)) * min(stride, 8)
        return start + max(away, volume * 7 / n / c["intra"])
    moved = (2 if op == "ar" else 1) * volume * (n - 1) / n
    if inside:
        return start + moved / c["intra"]
    return start + moved * min(stride, 8) / (c["node"] / slow(n))


def gemm(c, x):
    knots = c["gemm"]
    if x <= knots[0][0]:
        return knots[0][0] / (knots[0][1] * 1e12)
    if x >= knots[-1][0]:
        return x / (knots[-1][1] * 1e12)
    for (x0, r0), (x1, r1) in pairwise(knots):
        if x <= x1:
            share = log(x / x0) / log(x1 / x0)
            return x / (exp(log(r0) + share * log(r1 / r0)) * 1e12)
    raise AssertionError(x)


def attention(c, b, s, local):
    forward, backward = (
        t0 + c1 * b * s * local + flops * b * s * s * local / rate
        for (t0, c1, rate), flops in zip(c["fa"], (2, 5), strict=True)
    )
    return forward, backward


def kappa(mod, algo, sp, kind, imbalance):
    whole = {"isp": 0, "fsp": 0, "msp": 0, "mtp": 10 if mod["gelu"] else 8}[algo]
    wide = mod["kinds"][kind][2]
    if kind == "sparse":
        wide += (imbalance - 1) * mod["top"] * (4 + 8 * mod["each"] / mod["h"])
    return whole + (8 + 10 * mod["attended"] / mod["h"] - whole + wide) / sp


def away(mod, nodes):
    """Nodes that a token visits, if it takes its experts at random from those it may."""
    near = min(nodes, mod["limit"] or nodes)
    number, missed = mod["E"] * near // nodes, 1.0
    for drawn in range(mod["top"]):
        missed *= max(0, number - number // near - drawn) / (number - drawn)
    return near * (1 - missed)


def dispatched(c, mod, volume, ep, nodes):
    """One all-to-all of tokens."""
    if not nodes or ep <= 8:
        return collective(c, "a2a", volume, ep, 1)
    share = away(mod, ceil(ep / 8)) / mod["top"]
    start = c["alpha"][1] + c["alpha"][2] * max(0, ep - 16)
    outside = share * 8 * volume * (ep - 8) / ep / (c["node"] / slow(ep))
    return start + max(outside, volume * 7 / 8 / c["intra"])


def layer_time(c, mod, kind, case, options):
    """Seconds of one layer and one micro-batch, and what they are made of."""
    algo, n, s, pp, sp, b, _, ck, (para, grads, _) = case
    flash, k, d, ep, imbalance, nodes, hide = options
    h, shapes, full = mod["h"], mod["kinds"][kind][0], ck == 1
    tp = 1 if algo == "isp" else sp
    tokens = b * s / sp
    forward = sum(gemm(c, 2 * tokens * w) for w in shapes)
    copies = tokens * mod["top"] * imbalance
    routed = mod["E"] / ep * h * mod["each"]
    if kind == "sparse":
        once = gemm(c, 2 * copies * h * mod["each"])
        forward += 3 * max(once, d * routed / c["hbm"])
    comp_wp = (3 + full) * forward
    if flash:
        ahead, back = attention(c, b, s, mod["attended"] / sp)
        attn = (1 + full) * ahead + back
    else:
        moved = 12 * b * mod["a"] * s * s / sp / c["hbm"]
        ahead = 4 * b * s * s * mod["attended"] / sp / c["unfused"] + moved
        back, attn = 2 * ahead, (3 + (ck > 0)) * ahead
    groups = [(d * w / tp, para, grads, tp) for w in shapes]
    if kind == "sparse":
        held = n // pp // ep
        groups += [(d * routed, gcd(para, held), gcd(grads, held), ep)] * 3
    comm = 0.0
    for volume, p, g, stride in groups:
        comm += 2 * collective(c, "ag", volume, p, stride)
        comm += collective(c, "rs", volume, g, stride)
    overlap = max(comp_wp, comm) + k * min(comp_wp, comm) if comm else comp_wp
    t = d * b * s * h
    if algo == "isp":
        g = max(mod["kv"], min(sp, mod["a"])) / mod["a"]
        volume = t * mod["attended"] / h / sp
        sp_comm = collective(c, "a2a", volume, sp, 1) * (8 + 4 * full) * (2 + 2 * g) / 4
    elif algo == "mtp":
        sp_comm = collective(c, "ar", t, sp, 1) * (4 + 2 * full)
    else:
        calls = (8 if algo == "msp" else 10) + 4 * full
        calls /= 2 if kind == "sparse" and not mod["shared"] else 1
        sp_comm = collective(c, "ag", t, sp, 1) * calls
    touched = d / 2 * b * s * h * kappa(mod, algo, sp, kind, imbalance)
    element = 2 * (2.5 + full) * touched / c["hbm"]
    exchange = shown = 0.0
    if kind == "sparse":
        exchange = (4 + 2 * full) * dispatched(c, mod, d * h * copies, ep, nodes)
        work = comp_wp + attn + element
        shown = max(0, exchange - work) + k * min(exchange, work) if hide else exchange
    return {
        "seconds": overlap + sp_comm + attn + element + shown,
        "comp_wp": comp_wp,
        "comp_attn": attn,
        "wp_comm_cost": comm,
        "sp_comm_cost": sp_comm,
        "elementwise": element,
        "ep_comm_cost": exchange,
        "backward": 2 * forward + back,
    }


def pieces(mod, case, ep, layers, ends):
    """(elements, shards, ranks that hold them, their stride) of a stage, and ISP's ends."""
    algo, n, _, pp, sp, _, _, _, shards = case
    ends = min(ends, 1) if mod["tied"] else ends
    blocks, rest = sum(mod["kinds"][kind][1] for kind in layers), ends * mod["e"]
    if algo == "isp":
        found, rest = [(blocks, shards, n // pp, 1)], rest / sp
    else:
        found, rest = [((blocks + rest) / sp, shards, n // pp // sp, sp)], 0.0
    held = n // pp // ep
    routed = layers.count("sparse") * mod["E"] * 3 * mod["h"] * mod["each"] / ep
    if routed:
        found.append((routed, [gcd(each, held) for each in shards], held, ep))
    return found, rest


def step(
    c,
    mod,
    algo,
    n,
    s,
    pp,
    sp,
    b,
    m,
    ck,
    shards,
    ep=1,
    v=1,
    *,
    flash=True,
    k=0.2,
    d=2,
    imbalance=1.0,
    nodes=False,
    hide=False,
    scatter=False,
):
    """Seconds of a step and its parts."""
    case = (algo, n, s, pp, sp, b, m, ck, shards)
    options = (flash, k, d, ep, imbalance, nodes, hide)
    e, dp = mod["e"], n // pp // sp
    times = {kind: layer_time(c, mod, kind, case, options) for kind in mod["kinds"]}
    head = 3 * gemm(c, 2 * b * s / sp * e)
    stages = [
        sum(times[kind]["seconds"] for kind in stage_layers(mod, pp, place))
        for place in range(pp)
    ]
    stages[-1] += head
    slowest = max(stages)
    found, rest = pieces(mod, case, ep, stage_layers(mod, pp, pp - 1), 2 if pp == 1 else 1)
    grad = param = update = 0.0
    for elements, (para, grads, os), held, stride in found:
        volume = d * elements / grads
        calls = max(1, ceil(volume / (512 * 2**20)))
        grad += collective(c, "ar", volume, held // grads, stride * grads, calls)
        q = os // para
        param += q * collective(c, "bc", d * elements / os, q, stride * para)
        update += 30 * elements / os + 4 * elements / para
    grad += collective(c, "ar", d * rest, dp, sp, max(1, ceil(d * rest / (512 * 2**20))))
    if algo == "isp":
        param = max(param, collective(c, "bc", d * rest, dp, sp))
    update += 30 * rest / min(2, dp) + 4 * rest
    p2p = 0.0
    if pp > 1:
        whole = d * b * s * mod["h"]
        scatter = scatter and algo == "mtp"
        piece = whole / (1 if algo == "mtp" and not scatter else sp)
        stride = n // pp
        if pp <= 8 and (pp - 1) * stride <= 7:
            one = c["alpha"][0] + piece / c["intra"]
        else:
            one = c["alpha"][1] + piece * min(stride, 8) / c["node"]
        one += collective(c, "ag", whole, sp, 1) if scatter else 0
        p2p = 2 * (m + pp - 1) * v * one
    total = m * slowest + (sum(stages) - slowest) / v + p2p + grad + param + update / c["hbm"]
    usual = times["sparse" if "sparse" in times else "dense"]
    return usual | {
        "total_latency": total,
        "tgs": b * m * s * dp / (n * total),
        "grad_sync": grad,
        "param_sync": param,
        "optimizer": update / c["hbm"],
        "p2p": p2p,
        "head": head,
        "total_mm_cost": memory(mod, case, ep, v, flash, d, imbalance),
    }


def memory(mod, case, ep=1, v=1, flash=True, d=2, imbalance=1.0):
    """Bytes of the fullest stage."""
    algo, n, s, pp, sp, b, m, ck, (para, _, _) = case
    h, e, dp = mod["h"], mod["e"], n // pp // sp
    whole = 1 if algo == "mtp" else sp
    scores = 0 if flash else 5 * mod["a"] * s / (h * sp)
    unit, worst = d / 2 * b * s * h, 0.0
    live = {
        kind: unit * (kappa(mod, algo, sp, kind, imbalance) + scores) for kind in mod["kinds"]
    }
    usual = mod["kinds"].get("sparse", mod["kinds"]["dense"])
    for place in range(pp):
        layers, last = stage_layers(mod, pp, place), place == pp - 1
        found, rest = pieces(mod, case, ep, layers, (place == 0) + last)
        states = rest / min(2, dp) + sum(each / cut[2] for each, cut, _, _ in found)
        fixed = 2 * d * rest + 12 * states
        fixed += sum(d * each / cut[0] + d * each / cut[1] for each, cut, _, _ in found)
        flying = min(m, pp - place) * (1 + (pp - 1) / (pp * v) if v > 1 else 1)
        if ck == 1:
            used = flying * len(layers) * d * b * s * h / whole
            used += max(live[kind] for kind in layers)
        else:
            kept = unit * scores if ck else 0
            used = flying * sum(live[kind] - kept for kind in layers)
        if last:
            used += (4 + d) * b * s * h / whole + (d + 4) * b * s * mod["V"] / sp
            used += 2 * d * b * s * h * (1 + 1 / sp) + d * e / sp
        used += 4 * d * sum(usual[0]) / (1 if algo == "isp" else sp) if para > 1 else 0
        if mod["E"] and gcd(para, n // pp // ep) > 1:
            used += 4 * d * mod["E"] / ep * 3 * h * mod["each"]
        used += d * len(layers) * s * mod["rope"]
        used += d * b * s * h / whole if pp > 1 else 0
        worst = max(worst, 1.5e9 + max(fixed + used, fixed + 16 * states))
    return worst


def strategies(mod, n, s, tokens, algos=("isp", "msp", "fsp", "mtp")):
    """Every strategy that can exist, of one batch: as `step` takes it."""
    for pp in (pp for pp in range(1, min(n, mod["L"]) + 1) if n % pp == 0):
        for sp in (
            sp for sp in range(1, mod["a"] + 1) if n // pp % sp == 0 and mod["a"] % sp == 0
        ):
            dp = n // pp // sp
            if tokens % (dp * s):
                continue
            for algo in algos:
                if sp == 1 and algo in algos[1:] and algo in {"fsp", "mtp"}:
                    continue  # the same as the first, MSP
                if algo != "isp" and mod["kv"] % sp and sp % mod["kv"]:
                    continue
                if algo == "mtp" and mod["E"] and sp > 1:
                    continue
                whole = tokens // (dp * s)
                for b in (b for b in range(1, whole + 1) if whole % b == 0):
                    if whole // b >= pp:
                        layout = (algo, n, s, pp, sp, b, whole // b)
                        yield from _inside(mod, layout, n // pp if algo == "isp" else dp)


def _inside(mod, layout, replicas):
    """Every checkpointing, shard, spread of experts and number of virtual stages."""
    _, n, _, pp, _, _, m = layout
    cut = [x for x in range(1, replicas + 1) if replicas % x == 0]
    spread = [x for x in range(1, max(1, mod["E"]) + 1) if max(1, mod["E"]) % x == 0]
    virtual = [x for x in range(1, mod["L"] + 1) if mod["L"] % (pp * x) == 0]
    virtual = [1] if pp == 1 or not virtual or m % pp else virtual
    for ck in (0, 1):
        for o in cut:
            for g in (g for g in cut if o % g == 0):
                for p in (p for p in cut if g % p == 0):
                    for ep in (ep for ep in spread if n // pp % ep == 0):
                        for v in virtual:
                            yield *layout, ck, (p, g, o), ep, v
