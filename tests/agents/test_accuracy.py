"""Test the planted runs for agents, and how their answers are judged."""

import json

import anyio

from docs import agents_accuracy as accuracy


def test_planted_runs_have_questions_and_no_hint_of_the_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # small runs are written in this process
    accuracy.make(tmp_path, seed=257, large=0, count=4)
    truths = json.loads((tmp_path / "truth.json").read_text("utf-8"))
    questions = json.loads((tmp_path / "questions.json").read_text("utf-8"))["questions"]
    names = [f"run-0{number}" for number in range(1, 5)]
    assert [*truths] == [*questions] == names
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    assert [*(tmp_path / "runs").rglob("truth.json")] == []
    assert all(len(own) == 5 for own in questions.values())

    answers, log = anyio.run(accuracy.answers_of_client, tmp_path)
    verdict = accuracy.judge(tmp_path, answers)
    assert verdict["questions"] == 20
    assert verdict["right"] >= 18
    assert all(one["tokens"] < 2000 for one in log)


def test_sixty_runs_are_of_all_kinds_of_faults_and_none():
    made = [*accuracy._makers(1, 1)]
    assert len(made) == accuracy.COUNT
    faults = {arguments[0] for function, arguments in made if function is accuracy.made_up}
    assert faults == {*accuracy.FAULTS, *accuracy.IDLE_FAULTS, None}
    assert sum(arguments[1] == 512 for function, arguments in made if len(arguments) == 3) == 1


def test_wrong_missing_and_strange_answers_are_not_right(tmp_path):
    slow = {
        "source": "made-up",
        "is_hang": False,
        "cause": ["straggler"],
        "ranks": [[5], [4, 5]],
        "step_ms": 100.0,
        "cost_ms": 5.0,
        "cost_error_ms": 1.5,
        "healing_helps": True,
    }
    (tmp_path / "truth.json").write_text(json.dumps({"run-01": slow}), "utf-8")
    right = {
        "cause": "straggler",
        "ranks": [5, 4],
        "step_ms": 101,
        "cost_ms": 4.0,
        "healing_helps": True,
    }
    assert accuracy.judge(tmp_path, {"run-01": right})["share"] == 1
    strange = {
        "cause": ["straggler"],
        "ranks": 5,
        "step_ms": "100",
        "cost_ms": True,
        "healing_helps": 1,
    }
    wrong = {"cause": "none", "ranks": [], "step_ms": 90, "cost_ms": 9, "healing_helps": False}
    for answers in ({}, {"run-01": None}, {"run-01": strange}, {"run-01": wrong}):
        verdict = accuracy.judge(tmp_path, answers)
        assert verdict["right"] == 0
        assert [one["question"] for one in verdict["wrong"]] == [*accuracy.SLOW]


def test_the_order_of_the_runs_depends_on_the_seed(tmp_path):
    orders = []
    for seed in (1, 2):
        makers = [*accuracy._makers(seed, 0)]
        accuracy.Random(seed).shuffle(makers)
        orders.append([arguments for _, arguments in makers])
    assert orders[0] != orders[1]
