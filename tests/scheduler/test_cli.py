"""`resihp plan` and `resihp simulate`: tables, JSON, and one clear line for what is wrong."""

import json
import re

import pytest
from typer.testing import CliRunner

from resihp.cli import _plan, _simulate
from resihp.cli._app import app

JOB = """
name = "small"
microbatches = 16
[layout]
dp = 2
pp = 2
tp = 2
layers = 8
units = 8
[cost]
forward_ms = 1.0
backward_ms = 2.0
"""
LLAMA = """
name = "pretraining"
model = "llama-3-8b"
microbatches = 64
tokens_per_microbatch = 8192
device = "H100"
[layout]
dp = 4
pp = 4
tp = 2
[memory]
budget_bytes = 80_000_000_000
"""
FAULTS = """
hours = 1
[[fault]]
at_s = 600
rank = 1
speed = 0.5
"""
assert _plan.app is _simulate.app is app  # importing them registers both commands


@pytest.fixture
def run(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "faults.toml").write_text(FAULTS)
    (tmp_path / "binary.toml").write_bytes(b"\xd8\xc7")
    (tmp_path / "broken.toml").write_text("hours = = 1")
    (tmp_path / "elsewhere.toml").write_text(FAULTS.replace("rank = 1", "rank = 99"))

    def invoke(*arguments):
        files = {"JOB": tmp_path / "job.toml", "FAULTS": tmp_path / "faults.toml"}
        files["BINARY"] = tmp_path / "binary.toml"
        files["BROKEN"] = tmp_path / "broken.toml"
        files["ELSEWHERE"] = tmp_path / "elsewhere.toml"
        return CliRunner().invoke(app, [str(files.get(a, a)) for a in arguments])

    return invoke


def test_a_plan_is_one_json_object(run):
    result = run("plan", "JOB", "--speeds", '{"1": 0.5}', "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["plan"]["step_ms"] < document["present_step_ms"]
    assert sum(document["plan"]["quotas"]) == 16


def test_a_plan_is_a_table_with_reasons(run):
    result = run("plan", "JOB", "--speeds", "[1, 0.5, 1, 1, 1, 1, 1, 1]")
    assert result.exit_code == 0
    assert "rank 1 runs at 50% of its speed" in result.stdout
    assert "faster" in result.stdout


def test_a_rank_that_the_job_does_not_have_is_a_spare(run):
    result = run("plan", "JOB", "--speeds", '{"1": 0, "8": 1}')
    assert result.exit_code == 0
    assert "rank 1 has stopped and is left out" in result.stdout
    assert "rank 8 takes part" in result.stdout


def test_a_plan_that_is_slower_says_so_and_that_the_present_layout_does_not_fit(run, tmp_path):
    tight = str(tmp_path / "tight.toml")
    (tmp_path / "tight.toml").write_text(LLAMA.replace("80_000", "25_000"))
    document = json.loads(run("plan", tight, "--json").stdout)
    assert document["plan"]["step_ms"] > document["present_step_ms"]
    needed = "the present layout needs 33.9 GiB of 23.3 GiB on rank 0"
    assert needed in document["plan"]["reason"]
    told = " ".join(run("plan", tight).stdout.split())
    assert needed in told
    assert "the plan is 3.4% slower" in told
    roomy = " ".join(run("plan", "JOB").stdout.split())
    assert "the plan is 0.0% faster" in roomy
    assert "present layout needs" not in roomy


def test_a_name_in_brackets_is_printed_as_it_is(run, tmp_path):
    (tmp_path / "named.toml").write_text(JOB.replace("small", "run[v2] [red]x"))
    named = str(tmp_path / "named.toml")
    assert "run[v2] [red]x, plan 1" in run("plan", named).stdout
    played = run("simulate", named, "--scenario", "FAULTS", "--policy", "nothing").stdout
    assert "run[v2] [red]x: completed work" in played


def test_a_plan_that_moves_state_says_after_how_many_steps_it_pays(run, tmp_path):
    model = "[model]\nlayers = 8\nhidden = 512\nheads = 8\nkv_heads = 8\nffn = 2048\nvocab = 4096\n"
    links = "[links]\ninter_gbytes_per_s = 0.05\n"
    (tmp_path / "moving.toml").write_text(JOB.replace("tp = 2", "tp = 1") + model + links)
    result = run("plan", str(tmp_path / "moving.toml"), "--speeds", '{"1": 0.4}')
    assert result.exit_code == 0
    assert re.search(
        r"a migration of [\d.]+ m?s and break even after \d+ steps; it is applied if these",
        " ".join(result.stdout.split()),
    )


def test_json_says_when_the_migration_pays(run, tmp_path):
    model = "[model]\nlayers = 8\nhidden = 512\nheads = 8\nkv_heads = 8\nffn = 2048\nvocab = 4096\n"
    links = "[links]\ninter_gbytes_per_s = 0.05\n"
    (tmp_path / "moving.toml").write_text(JOB.replace("tp = 2", "tp = 1") + model + links)
    result = run("plan", str(tmp_path / "moving.toml"), "--speeds", '{"1": 0.4}', "--json")
    document = json.loads(result.stdout)
    migration = document["migration"]
    steps = migration["break_even_steps"]
    assert (steps - 1) * migration["saved_ms_per_step"] < migration["cost_ms"]
    assert f"break even after {steps} steps" in document["explanation"]
    healthy = json.loads(run("plan", "JOB", "--json").stdout)
    assert healthy["migration"] is healthy["explanation"] is None


def test_both_ends_of_the_front_are_printed_with_what_they_move(run, tmp_path):
    (tmp_path / "llama.toml").write_text(LLAMA)
    given = ("plan", str(tmp_path / "llama.toml"), "--speeds", '{"3": 0.6}')
    front = json.loads(run(*given, "--json").stdout)["front"]
    assert front[0]["step_ms"] < front[-1]["step_ms"] <= front[0]["step_ms"] * 1.01
    assert front[0]["total_bytes"] > front[-1]["total_bytes"] > 0.0
    text = " ".join(run(*given).stdout.split())
    size = r"at most [\d.]+ GiB a rank, [\d.]+ GiB in all, [\d.]+ m?s"
    assert re.search(rf"The plan moves {size}\. The one that moves least: {size}\.", text)
    price = r"costs [\d.]+ m?s and pays after \d+ steps?\."
    assert re.search(rf"The last [\d.]+% of the step .* moves [\d.]+ GiB, which {price}", text)


def test_a_plan_that_moves_nothing_says_so(run, tmp_path):
    (tmp_path / "llama.toml").write_text(LLAMA.replace("80_", "980_").replace("pp = 4", "pp = 1"))
    result = run("plan", str(tmp_path / "llama.toml"))
    assert "The plan moves nothing." in result.stdout


@pytest.fixture
def run_for(run, tmp_path):
    """A job of four replicas with these actions."""

    def invoke(actions, *arguments):
        job = JOB.replace("[layout]", f"actions = {json.dumps(actions)}\n[layout]")
        small = (
            job.replace("dp = 2", "dp = 4").replace("pp = 2", "pp = 1").replace("tp = 2", "tp = 1")
        )
        (tmp_path / "actions.toml").write_text(small)
        return run("plan", str(tmp_path / "actions.toml"), *arguments)

    return invoke


def test_a_job_with_quotas_alone_gets_other_quotas(run_for):
    document = json.loads(run_for(["quotas"], "--speeds", '{"1": 0.3}', "--json").stdout)
    plan = document["plan"]
    assert (plan["quotas"], plan["action"]) == ([5, 1, 5, 5], "quotas")
    assert len(plan["layout"]["replicas"]) == 4
    dead = run_for(["quotas"], "--speeds", '{"1": 0}')
    assert dead.exit_code == 1
    assert "cannot go on without rank 1" in dead.stdout


def test_a_job_that_restarts_is_told_when_that_pays(run_for):
    result = run_for(["restart"], "--speeds", '{"1": 0.3}')
    assert "for a restart of 60.1 s and break even after 301 steps" in " ".join(
        result.stdout.split()
    )


def test_a_plan_by_a_restart_says_what_that_costs(run_for):
    result = run_for(["restart"], "--speeds", '{"1": 0}')
    said = " ".join(result.stdout.split())
    assert said.count("applied by a restart, for 60.1 s of pause and of work done again") == 1


def test_a_job_that_takes_on_no_plan_gets_advice(run_for):
    result = run_for(["notify"], "--speeds", '{"1": 0.5}')
    assert result.exit_code == 0
    advice = "leave rank 1 out: steps 1.50x faster for the same work; replace it: 2.00x"
    assert result.stdout == f"This job takes on no plan; {advice}.\n"
    document = json.loads(run_for(["notify"], "--speeds", '{"1": 0.5}', "--json").stdout)
    assert document["plan"] is None
    assert (document["advice"]["ranks"], document["advice"]["step_ms"]) == ([1], 192.0)
    healthy = run_for(["notify"]).stdout
    assert healthy == "This job takes on no plan; nothing is to be gained.\n"


def test_an_action_that_there_is_not_is_named(run_for):
    result = run_for(["quota"])
    assert (result.exit_code, "actions[0]: must be one of layout" in result.stderr) == (2, True)


def test_a_spare_that_is_not_used_is_named(run):
    said = run("plan", "JOB", "--speeds", '{"98": 0.5, "99": 0.5}').stdout
    assert "• ranks 98 and 99 are spares, not used" in said
    assert "spare" not in run("plan", "JOB", "--speeds", '{"1": 0.5}').stdout


def test_a_share_that_stays_is_said_to_be_kept(run):
    said = run("plan", "JOB", "--speeds", '{"1": 0.97}').stdout
    assert "• rank 1 runs at 97% of its speed and keeps 4 of 8 units of its stage" in said


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ('device = "GB200"\n', "The device 'GB200' counts as 100 TFLOPS"),
        ("", "The device counts as a CPU: the job names none"),
        ('device = "H100"\n', None),
    ],
)
def test_a_rate_that_is_assumed_is_said(run, tmp_path, device, said):
    (tmp_path / "rate.toml").write_text(LLAMA.replace('device = "H100"\n', device))
    printed = run("plan", str(tmp_path / "rate.toml")).stdout
    assert said in printed if said else "counts as" not in printed
    no_model = JOB[: JOB.index("[cost]")]
    (tmp_path / "units.toml").write_text(no_model)
    assert (
        "One forward of a layer counts as 1 ms" in run("plan", str(tmp_path / "units.toml")).stdout
    )
    assert "counts as" not in run("plan", "JOB").stdout


def test_no_plan_names_what_binds(run):
    result = run("plan", "JOB", "--speeds", json.dumps([0] * 8), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["constraint"] == "ranks"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers = 8", "layers = 0", "layout: must hold at least one layer"),
        ("[layout]", "max_in_flight = 0\n[layout]", "max_in_flight"),
        ("[layout]", "tokens_per_microbatch = -5\n[layout]", "tokens_per_microbatch"),
        (
            "[layout]",
            'schedule = "interleaved"\nchunks = 2\nmax_in_flight = 1\n[layout]',
            "max_in_flight",
        ),
        ("forward_ms = 1.0", "forward_ms = 1e-320", "cost.forward_ms"),
        ("[layout]", f"extra = {'[' * 5000}\n[layout]", "not valid TOML"),
        ("layers = 8", f"layers = {'9' * 5000}", "not valid TOML"),
    ],
)
def test_a_job_that_cannot_be_planned_is_one_line(run, tmp_path, old, new, said):
    (tmp_path / "wrong.toml").write_text(JOB.replace(old, new))
    result = run("plan", str(tmp_path / "wrong.toml"), "--speeds", '{"1": 0.5}')
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "nowhere.toml"), "nowhere.toml: no such file"),
        (("plan", "JOB", "--speeds", '{"1": "fast"}'), "speeds.1"),
        (("plan", "JOB", "--speeds", '{"1": 100}'), "at least 0 and below 100"),
        (("plan", "BINARY"), "binary.toml: is not a text file"),
        (("plan", "JOB", "--speeds", "BINARY"), "binary.toml: is not a text file"),
        (("simulate", "JOB", "--scenario", "BINARY"), "binary.toml: is not a text file"),
        (("plan", "JOB", "--speeds", '{"one": 1}'), "speeds.one"),
        (("plan", "FAULTS"), "hours"),
        (("plan", "JOB", "--speeds", '{"0": 1, "00": 0.5}'), "speeds.00: stands twice"),
        (("plan", "JOB", "--speeds", '{"1": 1, "1": 0.5}'), "speeds.1: stands twice"),
        (("plan", "JOB", "--speeds", '{"2147483648": 1}'), "at most 2147483647"),
        (("plan", "JOB", "--speeds", '{"0": 1e-323}'), "is not a speed"),
        (("plan", "JOB", "--speeds", f'{{"{"9" * 5000}": 1}}'), "the key must be a rank"),
        (("plan", "JOB", "--speeds", "[" * 100_000), "not valid JSON"),
        (("plan", "JOB", "--speeds", "[1, 1, 0.5]"), "speeds: 3 speeds for 8 ranks"),
        (("plan", "JOB", "--speeds", '{"99": 0}'), "speeds.99: the job has no rank 99"),
        (("plan", "BROKEN"), "broken.toml: not valid TOML"),
        (("simulate", "JOB", "--scenario", "BROKEN"), "broken.toml: not valid TOML"),
        (("plan", "JOB", "--speeds", ""), "neither JSON nor a file"),
        (("plan", "JOB", "--speeds", "5"), "neither JSON nor a file"),
        (("plan", "JOB", "--time-limit", "-1"), "must be above 0"),
        (("plan", "JOB", "--time-limit", "nan"), "must be above 0"),
        (("simulate", "JOB", "--scenario", "JOB"), "name"),
        (("simulate", "JOB", "--scenario", "FAULTS", "--policy", "magic"), "policy"),
        (("simulate", "JOB", "--scenario", "ELSEWHERE"), "rank 99 does not work"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_scenario_is_played_drawn_and_printed(run, tmp_path):
    picture = tmp_path / "out.svg"
    names = ("--policy", "nothing", "--policy", "joint")
    played = ("simulate", "JOB", "--scenario", "FAULTS", *names)
    result = run(*played, "--plot", str(picture), "--json")
    assert result.exit_code == 0
    goodput = {p["policy"]: p["goodput"] for p in json.loads(result.stdout)["policies"]}
    assert goodput["nothing"] < goodput["joint"] <= 1.0
    assert picture.read_bytes().startswith(b"<?xml")
    assert "joint" in run(*played).stdout
