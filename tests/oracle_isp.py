# ruff: noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917
"""The price of one strategy by the definition: plain numbers, one formula after the other."""

from itertools import pairwise
from math import ceil, exp, log

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


def model(h, a, layers, *, kv=None, f=None, vocab=103168, gelu=False):
    kv = kv or a
    f = f or (4 * h if gelu else width(h))
    g = kv / a
    shapes = [(1 + 2 * g) * h * h, h * h, *[h * f] * (2 if gelu else 3)]
    usual = f == (4 * h if gelu else width(h))
    wide = (16.0 if gelu else 64 / 3) if usual else (4 if gelu else 8) * f / h
    p = sum(shapes) + (0 if gelu else 2 * h)
    return {
        "h": h,
        "a": a,
        "kv": kv,
        "L": layers,
        "f": f,
        "V": vocab,
        "gelu": gelu,
        "e": vocab * h,
        "shapes": shapes,
        "p": p,
        "wide": wide,
    }


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


def kappa(mod, algo, sp, kept):
    whole = {"isp": 0, "fsp": 0, "msp": 4 if kept else 0, "mtp": 10 if mod["gelu"] else 8}[algo]
    return whole + (18 - whole + mod["wide"]) / sp


def step(c, mod, algo, n, s, pp, sp, b, m, ck, shards, flash=True, k=0.2, d=2):
    """Seconds of a step and its parts."""
    h, layers, e = mod["h"], mod["L"], mod["e"]
    para, grads, os = shards
    dp = n // pp // sp
    tp = 1 if algo == "isp" else sp
    replicas = n // pp if algo == "isp" else dp
    full = ck == 1
    tokens = b * s / sp
    forward = sum(gemm(c, 2 * tokens * w) for w in mod["shapes"])
    comp_wp = (3 + full) * forward
    if flash:
        ahead, back = attention(c, b, s, h / sp)
        attn = (1 + full) * ahead + back
    else:
        ahead = (
            4 * b * s * s * h / sp / c["unfused"] + 12 * b * mod["a"] * s * s / sp / c["hbm"]
        )
        attn = (3 + (ck > 0)) * ahead
    comm = 0.0
    for w in mod["shapes"]:
        if para > 1:
            comm += 2 * collective(c, "ag", d * w / tp, para, tp)
        if grads > 1:
            comm += collective(c, "rs", d * w / tp, grads, tp)
    overlap = max(comp_wp, comm) + k * min(comp_wp, comm) if comm else comp_wp
    t = d * b * s * h
    if algo == "isp":
        g = max(mod["kv"], min(sp, mod["a"])) / mod["a"]
        sp_comm = collective(c, "a2a", t / sp, sp, 1) * (8 + 4 * full) * (2 + 2 * g) / 4
    elif algo == "mtp":
        sp_comm = collective(c, "ar", t, sp, 1) * (4 + 2 * full)
    else:
        sp_comm = collective(c, "ag", t, sp, 1) * ((8 if algo == "msp" else 10) + 4 * full)
    element = 2 * (2.5 + full) * d / 2 * b * s * h * kappa(mod, algo, sp, False) / c["hbm"]
    layer = overlap + sp_comm + attn + element
    head = 3 * gemm(c, 2 * tokens * e)
    longest = ceil(layers / pp)
    ends = 2 if pp == 1 else 1
    if algo == "isp":
        blocks, rest = longest * mod["p"], ends * e / sp
    else:
        blocks, rest = (longest * mod["p"] + ends * e) / sp, 0.0
    volume = d * blocks / grads
    grad = collective(
        c, "ar", volume, replicas // grads, tp * grads, max(1, ceil(volume / (512 * 2**20)))
    )
    grad += collective(c, "ar", d * rest, dp, sp, max(1, ceil(d * rest / (512 * 2**20))))
    q = os // para
    param = q * collective(c, "bc", d * blocks / os, q, tp * para)
    if algo == "isp":
        param = max(param, collective(c, "bc", d * rest, dp, sp))
    update = 30 * (blocks / os + rest / min(2, dp)) + 4 * (blocks / para + rest)
    p2p = 0.0
    if pp > 1:
        piece = t / (1 if algo == "mtp" else sp)
        stride = n // pp
        if pp <= 8 and (pp - 1) * stride <= 7:
            one = c["alpha"][0] + piece / c["intra"]
        else:
            one = c["alpha"][1] + piece * min(stride, 8) / c["node"]
        p2p = 2 * (m + pp - 1) * one
    slowest = longest * layer + head
    total = layers * layer + head + (m - 1) * slowest + p2p + grad + param + update / c["hbm"]
    return {
        "total_latency": total,
        "tgs": b * m * s * dp / (n * total),
        "comp_wp": comp_wp,
        "comp_attn": attn,
        "wp_comm_cost": comm,
        "sp_comm_cost": sp_comm,
        "grad_sync": grad,
        "param_sync": param,
        "optimizer": update / c["hbm"],
        "p2p": p2p,
        "head": head,
        "elementwise": element,
        "total_mm_cost": memory(mod, algo, n, s, pp, sp, b, m, ck, shards, flash, d),
    }


def memory(mod, algo, n, s, pp, sp, b, m, ck, shards, flash=True, d=2):
    """Bytes of the fullest stage."""
    h, layers, e, a = mod["h"], mod["L"], mod["e"], mod["a"]
    para, grads, os = shards
    dp = n // pp // sp
    worst = 0.0
    for place in range(pp):
        mine = layers // pp + (place >= pp - layers % pp)
        last = place == pp - 1
        ends = (place == 0) + last
        if algo == "isp":
            blocks, rest = mine * mod["p"], ends * e / sp
        else:
            blocks, rest = (mine * mod["p"] + ends * e) / sp, 0.0
        states = blocks / os + rest / min(2, dp)
        fixed = d * (blocks / para + rest) + d * (blocks / grads + rest) + 12 * states
        whole = 1 if algo == "mtp" else sp
        scores = 0 if flash else 5 * a * s / (h * sp)
        unit = d / 2 * b * s * h
        live = unit * (kappa(mod, algo, sp, True) + scores)
        stored = live if ck == 0 else live - unit * scores
        flying = min(m, pp - place)
        used = flying * mine * (d * b * s * h / whole if ck == 1 else stored)
        used += live if ck == 1 else 0
        if last:
            used += (4 + d) * b * s * h / whole + (d + 4) * b * s * mod["V"] / sp
            used += 2 * d * b * s * h * (1 + 1 / sp) + d * e / sp
        used += 4 * d * sum(mod["shapes"]) / (1 if algo == "isp" else sp) if para > 1 else 0
        used += d * mine * s * (h // a)
        used += d * b * s * h / whole if pp > 1 else 0
        worst = max(worst, 1.5e9 + max(fixed + used, fixed + 16 * states))
    return worst


def strategies(mod, n, s, tokens, algos=("isp", "msp", "fsp", "mtp")):
    """Every strategy that can exist, of one batch."""
    for pp in (pp for pp in range(1, min(n, mod["L"]) + 1) if n % pp == 0):
        for sp in (
            sp for sp in range(1, mod["a"] + 1) if n // pp % sp == 0 and mod["a"] % sp == 0
        ):
            dp = n // pp // sp
            if tokens % (dp * s):
                continue
            whole = tokens // (dp * s)
            pairs = [(b, whole // b) for b in range(1, whole + 1) if whole % b == 0]
            for algo in algos:
                if algo != "isp" and mod["kv"] % sp and sp % mod["kv"]:
                    continue
                r = n // pp if algo == "isp" else dp
                cut = [x for x in range(1, r + 1) if r % x == 0]
                for b, m in pairs:
                    for ck in (0, 1):
                        for o in cut:
                            for g in (g for g in cut if o % g == 0):
                                for p in (p for p in cut if g % p == 0):
                                    if m >= pp:
                                        yield algo, n, s, pp, sp, b, m, ck, (p, g, o)
