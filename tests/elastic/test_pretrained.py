"""Folders in Hugging Face's format, without transformers: ranges, refusals, unfinished folders.

That names and numbers are those of transformers is tested in tests/integrations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, Layout
from resihp.elastic.models import (
    Gpt2,
    Llama,
    Mixture,
    from_pretrained,
    preset,
    save_pretrained,
)
from resihp.elastic.models.pretrained.configuration import config_of, model_of
from resihp.elastic.models.pretrained.folder import PretrainedFolder
from resihp.elastic.models.pretrained.presets import CONFIGURATIONS
from resihp.elastic.models.pretrained.tensor_files import (
    StoredTensor,
    TensorFiles,
    create,
    plan_files,
    write,
)
from resihp.elastic.models.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from resihp.elastic.step.memory import LiveTensors
from resihp.layout import Param, holdings
from scheduler import MODEL_PRESETS
from tests.elastic.test_models import LAYOUTS, MODELS, SHAPE, TIED

Tensors = dict[Param, torch.Tensor]
LLAMA3 = Llama3Rope(
    theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SAVED: dict[str, Llama | Gpt2] = {
    **{name: model for name, model in MODELS.items() if name != "llama with options"},
    "llama 3": Llama(TIED, rope=LLAMA3, qkv_bias=True, output_bias=True),
    "mistral": Llama(SHAPE, windows=(5,) * 4, rope=LinearRope(factor=2.0)),
    "qwen2": Llama(SHAPE, qkv_bias=True, windows=(None, None, 4, 4)),
    "qwen3": Llama(
        replace(SHAPE, head_dim=6),
        qk_norm=True,
        rope=YarnRope(theta=1e6, factor=4.0, original_max_position_embeddings=16),
    ),
    "dynamic": Llama(SHAPE, rope=DynamicRope(factor=2.0, max_position_embeddings=64)),
}


def shards_of(model: Llama | Gpt2, layout: Layout) -> dict[int, Tensors]:
    """Each rank's ranges of the model's initial values."""
    return {
        rank: {param: model.initial(param, span) for param, span in held.items()}
        for rank, held in holdings(layout, model.parameters).items()
    }


def save_all(model: Llama | Gpt2, layout: Layout, folder: Path, **options: Any) -> list[bool]:
    return [
        save_pretrained(model, tensors, folder, layout=layout, rank=rank, **options)
        for rank, tensors in shards_of(model, layout).items()
    ]


def assert_same_values(model: Llama | Gpt2, other: Llama | Gpt2) -> None:
    assert other.parameters == model.parameters
    for param in model.parameters.all:
        span = (0, param.size)
        assert torch.equal(other.initial(param, span), model.initial(param, span)), param.key


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Folder of a small Llama."""
    save_all(SAVED["llama"], LAYOUTS["deep"], tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", SAVED.values(), ids=SAVED)
def test_what_ranks_of_any_layout_write_is_the_model(
    model: Llama | Gpt2, layout: Layout, tmp_path: Path
) -> None:
    done = save_all(model, layout, tmp_path, max_file_bytes=20_000)
    assert done == [False] * (len(done) - 1) + [True]
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    again = from_pretrained(tmp_path)
    assert_same_values(model, again)
    assert type(again) is type(model)
    assert {**vars(again), "parameters": 0, "pretrained": 0, "seed": 0} == {
        **vars(model), "parameters": 0, "pretrained": 0, "seed": 0
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", ["tied", "gpt2", "mixture"])
def test_a_rank_reads_its_ranges_and_no_other_byte(
    model: str, layout: Layout, tmp_path: Path
) -> None:
    save_all(SAVED[model], layout, tmp_path, dtype=torch.bfloat16)
    for rank, held in holdings(layout, SAVED[model].parameters).items():
        own = from_pretrained(tmp_path)
        folder = own.pretrained
        assert isinstance(folder, PretrainedFolder)
        assert folder.files.bytes_read == 0
        for param, (start, stop) in held.items():
            with LiveTensors() as tensors:
                values = own.initial(param, (start, stop))
            assert tensors.peak_bytes <= 3 * values.nbytes, "besides, no more than the range"
        due = sum((stop - start) * param.row_numel for param, (start, stop) in held.items())
        assert folder.files.bytes_read == 2 * due, f"rank {rank}"


@given(st.data())
def test_any_region_of_a_tensor_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("region")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    files, places = plan_files({"other": (3,), "one": shape}, dtype, folder, 1 << 20)
    create(files[0], folder)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    write(places["one"], tuple((0, size) for size in shape), whole)
    edges = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    region = tuple((start, stop) for start, stop in edges)
    part = whole[tuple(slice(*span) for span in region)]
    read = TensorFiles(folder)
    assert torch.equal(read.read("one", region), part)
    assert read.bytes_read == part.numel() * dtype.itemsize
    write(places["one"], region, -part)
    whole[tuple(slice(*span) for span in region)] *= -1
    assert torch.equal(TensorFiles(folder).read("one", tuple((0, s) for s in shape)), whole)


def test_long_regions_are_read_in_blocks(tmp_path: Path) -> None:
    stored = StoredTensor(tmp_path, 100, torch.float32, (1 << 16, 1 << 10))
    runs = [*stored.runs(((3, 1 << 15), (0, 1 << 10)))]
    assert max(length for _, length in runs) == 16 << 20
    assert runs[0][0] == 100 + 3 * 4096
    assert sum(length for _, length in runs) == ((1 << 15) - 3) * 4096


def test_a_folder_is_complete_when_the_last_rank_has_written(tmp_path: Path) -> None:
    model, layout = SAVED["llama"], LAYOUTS["uneven"]
    shards = shards_of(model, layout)
    last = layout.ranks[-1]
    for rank, tensors in shards.items():
        if rank != last:
            assert not save_pretrained(model, tensors, tmp_path, layout=layout, rank=rank)
    with pytest.raises(ContractError, match=r"has no config\.json"):
        from_pretrained(tmp_path)
    for step in (1, 0):  # what another save left behind does not count
        assert save_pretrained(
            model, shards[last], tmp_path, layout=layout, rank=last, step=step
        ) == (step == 0)
    assert_same_values(model, from_pretrained(tmp_path))
    assert not save_pretrained(model, {}, tmp_path, layout=layout, rank=99)


def test_a_later_save_replaces_an_earlier_one_and_no_other_file(tmp_path: Path) -> None:
    save_all(SAVED["llama"], LAYOUTS["deep"], tmp_path, max_file_bytes=9_000)
    mine = {"model_ema.safetensors", "model-card.safetensors"}
    for name in mine:
        (tmp_path / name).touch()
    other = Llama(SHAPE, seed=1)
    save_all(other, LAYOUTS["grid"], tmp_path)
    written = {"config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == written | mine
    assert_same_values(other, from_pretrained(tmp_path))


def test_tensors_of_another_layout_are_not_saved(tmp_path: Path) -> None:
    model, layout = SAVED["llama"], LAYOUTS["grid"]
    whole = {param: model.initial(param, (0, param.size)) for param in model.parameters.all}
    with pytest.raises(ContractError, match=r"has shape \[.*\]; in the layout rank 0 holds"):
        save_pretrained(model, whole, tmp_path / "whole", layout=layout)
    with pytest.raises(ContractError, match="is missing: rank 0 holds it"):
        save_pretrained(model, {}, tmp_path / "whole", layout=layout)
    assert not (tmp_path / "whole").exists()


def test_what_was_read_is_saved_with_its_configuration(llama: Path, tmp_path: Path) -> None:
    model = from_pretrained(llama, {"eos_token_id": 7})
    save_all(model, LAYOUTS["grid"], tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == 7
    assert_same_values(model, from_pretrained(tmp_path / "again"))


BASE = {**config_of(SAVED["llama"]), "max_position_embeddings": 64}
GPT2 = config_of(SAVED["gpt2"])
QWEN = {**BASE, "model_type": "qwen2"}
NEWER = {**BASE, "rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("config", "key", "value", "message"),
    [
        (BASE, "model_type", "gemma", "model_type: 'gemma' is not supported"),
        (BASE, "hidden_act", "gelu", "hidden_act: 'gelu' is not supported"),
        (BASE, "attention_dropout", 0.1, "attention_dropout: 0.1"),
        (BASE, "mlp_bias", True, "mlp_bias: True"),
        (BASE, "quantization_config", {"bits": 4}, "quantization_config: {'bits': 4}"),
        (BASE, "partial_rotary_factor", 0.5, "partial_rotary_factor: 0.5"),
        (BASE, "rope_scaling", {"rope_type": "longrope"}, "rope_type: 'longrope'"),
        (BASE, "rope_scaling", {"type": "linear", "factor": 2.0, "bend": 1}, "bend: 1"),
        (BASE, "rope_scaling", {"type": "linear"}, "factor: is missing for rope_type 'linear'"),
        (NEWER, "rope_parameters", {"rope_theta": 5.0, "partial_rotary_factor": 0.5}, "partial_"),
        (BASE, "rope_parameters", {"rope_theta": 5.0}, "rope_theta: is 10000.0 and, in rope_param"),
        (NEWER, "rope_theta", 5.0, "rope_theta: is 5.0 and, in rope_parameters, 1000000.0"),
        (NEWER, "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling: says LinearRope"),
        (BASE, "hidden_size", None, "hidden_size: is missing"),
        (BASE, "rms_norm_eps", "small", "rms_norm_eps: must be a number, not 'small'"),
        (QWEN, "layer_types", ["chunked_attention"] * 4, "layer_types: 'chunked_attention'"),
        (GPT2, "activation_function", "relu", "activation_function: 'relu'"),
        (GPT2, "attn_pdrop", 0.2, "attn_pdrop: 0.2 is not supported beside resid_pdrop 0.1"),
        (GPT2, "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx: True"),
        (GPT2, "tie_word_embeddings", False, "tie_word_embeddings: False is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], key: str, value: Any, message: str
) -> None:
    model_of(config)
    with pytest.raises(ContractError, match=message):
        model_of({**config, key: value})


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (None, Rope(theta=7.0)),
        ({"rope_type": "default"}, Rope(theta=7.0)),
        ({"type": "linear", "factor": 2.0}, LinearRope(theta=7.0, factor=2.0)),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            DynamicRope(theta=7.0, factor=2.0, max_position_embeddings=64),
        ),
        (
            {"rope_type": "yarn", "factor": 2.0},
            YarnRope(theta=7.0, factor=2.0, original_max_position_embeddings=64),
        ),
    ],
)
def test_positions_in_older_and_newer_configurations(
    scaling: dict[str, Any] | None, rope: Rope
) -> None:
    older = {**BASE, "rope_theta": 7.0, "rope_scaling": scaling}
    newer = {**BASE, "rope_theta": None, "rope_parameters": {"rope_theta": 7.0, **(scaling or {})}}
    for config in (older, newer, older | newer | {"rope_theta": 7}):
        model = model_of(config)
        assert isinstance(model, Llama)
        assert model.rope == rope


class OtherRope(Rope):
    """Positions of a user."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Llama(SHAPE, windows=(4, None, 4, 4)), "windows"),
        (Llama(SHAPE, output_bias=True), "output_bias"),
        (Llama(SHAPE, windows=(4,) * 4, qkv_bias=True, output_bias=True), "windows"),
        (Llama(SHAPE, qkv_bias=True, windows=(4, None, 5, 4)), "windows"),
        (Mixture(SHAPE, experts=2, top_k=1, windows=(4, None, 4, 4)), "windows"),
        (Llama(SHAPE, rope=OtherRope()), "rope: no architecture has OtherRope"),
    ],
)
def test_a_model_that_the_format_cannot_describe_is_not_saved(
    model: Llama, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match=message):
        save_all(model, LAYOUTS["grid"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_type_that_the_format_lacks_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"dtype: must be one of floats, not torch\.int8"):
        save_all(SAVED["llama"], LAYOUTS["grid"], tmp_path / "new", dtype=torch.int8)
    assert not (tmp_path / "new").exists()


def test_an_unknown_key_can_be_ignored(llama: Path) -> None:
    path = llama / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "made_by": "a tool"}))
    with pytest.raises(ContractError, match="made_by: 'a tool' is not supported or not known"):
        from_pretrained(llama)
    from_pretrained(llama, {"made_by": None})


def spoil_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write the tensors' file again with another header."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return change


def set_dtype(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "F8_E4M3"


def set_shape(header: dict[str, Any]) -> None:
    header["model.norm.weight"] |= {"shape": [4, 8]}


def set_offsets(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["data_offsets"] = [1 << 30, (1 << 30) + 128]


def drop_offsets(header: dict[str, Any]) -> None:
    del header["model.norm.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_offsets, r"model\.safetensors: is damaged: 'model.norm.weight' is {"),
        (rename("lm_head.weight", "lm_head.extra"), "lm_head.weight: is in none of the files"),
        (lambda header: header.update(extra=header["model.norm.weight"]), "extra: is in the files"),
        (set_dtype, "model.norm.weight: is F8_E4M3 in model.safetensors"),
        (set_shape, r"model.norm.weight: has shape \[4, 8\]; the configuration says \[32\]"),
        (set_offsets, "model.norm.weight: lies outside of model.safetensors"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    llama: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    spoil_header(llama, change)
    with pytest.raises(ContractError, match=message):
        from_pretrained(llama)


def test_damaged_and_missing_files(llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(ContractError, match="lies outside of"):
        from_pretrained(llama)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ContractError, match="is no safetensors file"):
        from_pretrained(llama)
    path.unlink()
    with pytest.raises(ContractError, match=r"has neither model\.safetensors nor"):
        from_pretrained(llama)
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ContractError, match="outside the folder"):
        from_pretrained(llama)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *product(("config.json", "model.safetensors.index.json"), ("", "{bad", "[]", "\xff")),
        *product(("model.safetensors.index.json",), ("{}", '{"weight_map": 1}')),
    ],
)
def test_damaged_json_is_refused_with_its_path(llama: Path, name: str, text: str) -> None:
    (llama / name).write_text(text, encoding="latin-1")
    with pytest.raises(ContractError, match=re.escape(name)):
        from_pretrained(llama)


def test_a_file_that_is_cut_off_later_is_noticed(llama: Path) -> None:
    model = from_pretrained(llama)
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ContractError, match="has become shorter"):
        shards_of(model, LAYOUTS["deep"])


def test_files_of_a_bare_body_and_tensors_that_follow_from_others(tmp_path: Path) -> None:
    """Names without a prefix, masks beside them: as in the first published GPT-2."""
    save_all(SAVED["gpt2"], LAYOUTS["deep"], tmp_path)

    def strip(header: dict[str, Any]) -> None:
        for name in [*header]:
            header[name.removeprefix("transformer.")] = header.pop(name)
        header["h.0.attn.bias"] = {**header["ln_f.bias"], "dtype": "U8", "shape": [1, 1, 8, 16]}

    spoil_header(tmp_path, strip)
    assert_same_values(SAVED["gpt2"], from_pretrained(tmp_path))


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
"""Parameters of the published weights, a tied head counted once."""


def test_presets_have_as_many_parameters_as_the_published_weights() -> None:
    assert {name: _numel(preset(name)) for name in CONFIGURATIONS} == PUBLISHED


def test_presets_have_the_shapes_that_the_scheduler_knows() -> None:
    common = MODEL_PRESETS.keys() & CONFIGURATIONS.keys()
    assert len(common) >= 7
    for name in common:
        assert preset(name).shape == MODEL_PRESETS[name]
    with pytest.raises(ContractError, match=r"must be one of gpt2, .*, not 'llama-9'"):
        preset("llama-9")


def _numel(model: Llama | Gpt2) -> int:
    return sum(param.size * param.row_numel for param in model.parameters.all)
