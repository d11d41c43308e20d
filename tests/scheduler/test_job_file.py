"""Job files: presets and grids are written out, and what is wrong is named by its field."""

import pytest

from resihp.contracts import ContractError, Layout, Schedule
from scheduler.job_file import MODEL_PRESETS, model_preset, parse_job

GOOD = """
name = "pretraining"
model = "llama-3-8b"
microbatches = 64
tokens_per_microbatch = 8192
schedule = "zero_bubble"

[layout]
dp = 4
pp = 4
tp = 2

[memory]
budget_bytes = 80_000_000_000
"""


def test_a_preset_and_a_grid_are_written_out():
    job = parse_job(GOOD)
    assert job.model == model_preset("Llama-3-8B")
    assert (job.layout.dp, job.layout.pp, job.layout.tp, job.layout.layers) == (4, 4, 2, 32)
    assert job.layout.replicas[0].stages[0].shares == (4, 4)
    assert job.schedule is Schedule.ZERO_BUBBLE
    assert job.memory.budget_bytes == 80_000_000_000


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("microbatches = 64", "microbatches = 0"), "microbatches"),
        (("microbatches = 64", 'microbatches = "many"'), "microbatches"),
        (("llama-3-8b", "llama-9"), "model"),
        (("tp = 2", "tp = 2\ncp = 3"), "layout.cp"),
        (("tp = 2", "tp = 16"), "layout.tp"),
        (("tp = 2", ""), "layout.tp"),
        (("tp = 2", "tp = 2.5"), "layout.tp"),
        (("budget_bytes", "budget"), "memory.budget"),
        (("budget_bytes = ", "budget_bytes = -"), "memory.budget_bytes"),
        (("zero_bubble", "zero"), "schedule"),
        (('name = "pretraining"', ""), "name"),
        (("[layout]", "[layout"), ""),
    ],
)
def test_what_is_wrong_is_named(change, field):
    with pytest.raises(ContractError) as caught:
        parse_job(GOOD.replace(*change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("qwen2.5-7b", 7.61),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("qwen2.5-72b", 72.7),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    shape = MODEL_PRESETS[name]
    total = shape.layers * shape.layer_params + 2 * shape.embedding_params
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_grid_of_an_interleaved_job_has_the_chunks_of_the_job():
    text = """
name = "chunked"
microbatches = 8
schedule = "interleaved"
chunks = 2

[layout]
dp = 1
pp = 2
tp = 1
layers = 8
"""
    assert parse_job(text).layout == Layout.grid(dp=1, pp=2, tp=1, layers=8, chunks=2)
    with pytest.raises(ContractError, match="several stages"):
        parse_job(text.replace("pp = 2", "pp = 1"))
    with pytest.raises(ContractError, match="chunks"):
        parse_job(text.replace("chunks = 2", "chunks = 0"))
    with pytest.raises(ContractError, match="chunks: must be 1 with the schedule 1f1b"):
        parse_job(text.replace('schedule = "interleaved"', ""))
