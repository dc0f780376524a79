"""Models and strategies of the default search, for fastcomm and for the oracle."""

from hypothesis import strategies as st
from oracles import isp as oracle

from fastcomm.hardware.clusters import load
from fastcomm.isp.problem import MicroBatchRule, SearchProblem
from fastcomm.isp.space import StrategyGrid, divisors
from fastcomm.models import Experts, Latent, Model, internlm

A800 = load("a800")
ANY = MicroBatchRule(least=1, most=1 << 50)
ALGOS = ("isp", "msp", "fsp", "mtp")


def ours(model):
    experts = model["experts"] and Experts(
        **dict(
            zip(
                ("number", "top_k", "ffn", "shared", "dense_layers", "node_limit"),
                model["experts"],
                strict=True,
            )
        )
    )
    latent = model["latent"] and Latent(
        **dict(
            zip(("q_rank", "kv_rank", "nope", "rope", "value"), model["latent"], strict=True)
        )
    )
    return Model(
        name="m",
        hidden=model["h"],
        heads=model["a"],
        kv_heads=model["kv"],
        layers=model["L"],
        ffn=model["f"],
        vocab=model["V"],
        mlp="gelu" if model["gelu"] else "swiglu",
        head_dim=model["head"] or 0,
        latent=latent,
        experts=experts,
        tied=model["tied"],
    )


def problem(model=None, seq_len=4096, world=8, batch=ANY, **more):
    model = internlm(7) if model is None else model
    return SearchProblem(
        model=model, world_sizes=(world,), seq_len=seq_len, batch=batch, **more
    )


@st.composite
def models(draw, sparse):
    heads = draw(st.sampled_from([8, 12, 32]))
    layers = draw(st.integers(8, 41))
    shape = {"f": draw(st.sampled_from([None, 3 * 1024])), "tied": draw(st.booleans())}
    if not sparse:
        kv = draw(st.sampled_from([heads, heads // 4]))
        shape |= {"kv": kv, "gelu": draw(st.booleans())}
        return oracle.model(heads * 128, heads, layers, **shape)
    shape["head"] = draw(st.sampled_from([None, 192]))
    if draw(st.booleans()):
        shape["head"], shape["latent"] = None, (384, 128, 64, 32, 96)
    number = draw(st.sampled_from([8, 48, 64]))
    shared, first = draw(st.sampled_from([0, 1024])), draw(st.sampled_from([0, 1, 5]))
    top, limit = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0, 2]))
    experts = (number, top, draw(st.sampled_from([512, 4096])), shared, first, limit)
    return oracle.model(heads * 128, heads, layers, experts=experts, **shape)


@st.composite
def cases(draw, sparse=False):
    model = draw(models(sparse))
    heads = model["a"]
    world = draw(st.sampled_from([1, 4, 6, 8, 24, 64, 768]))
    pp = draw(st.sampled_from([n for n in divisors(world) if n <= 8]))
    sp = draw(st.sampled_from([n for n in divisors(world // pp) if heads % n == 0]))
    algo = draw(st.sampled_from(ALGOS[:3] if sparse and sp > 1 else ALGOS))
    os = draw(st.sampled_from(divisors(world // pp if algo == "isp" else world // pp // sp)))
    grads = draw(st.sampled_from(divisors(os)))
    para = draw(st.sampled_from(divisors(grads)))
    ck = draw(st.sampled_from([0, 1, 2]))
    seq_len = draw(st.sampled_from([512, 3000, 4096, 131072]))
    bsz, num = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    flash = ck < 2 and draw(st.booleans())
    spread = [n for n in divisors(world // pp) if model["E"] % n == 0] if sparse else [1]
    ep, stages = (
        draw(st.sampled_from(spread)),
        draw(st.sampled_from([1, 2, 3] if pp > 1 else [1])),
    )
    case = (algo, world, seq_len, pp, sp, bsz, num, ck, (para, grads, os), ep, stages)
    return model, case, flash


def block_of(case):
    algo, world, _, pp, sp, bsz, num, ck, shards, ep, stages = case
    return StrategyGrid.one(
        world=world,
        algo=algo,
        pp=pp,
        sp=sp,
        bsz=bsz,
        num=num,
        recompute=ck,
        shards=shards,
        ep=ep,
        interleave=stages,
    )
