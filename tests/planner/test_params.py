"""Parameter counts against published totals and the identities of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcmoe.config.model_schema import MlaConfig, ModelConfig
from hpcmoe.planner import published
from hpcmoe.planner.params import model_params
from hpcmoe.planner.shapes import Shape, from_config
from hpcmoe.resources import resource_dir

DATA = published.read(Path(__file__).parents[1] / "data" / "published.yaml")


def shape_from_file(name: str) -> Shape:
    raw = yaml.safe_load((resource_dir("conf") / "model" / f"{name}.yaml").read_text())
    mla = raw.pop("mla", None)
    return from_config(ModelConfig(**raw, mla=MlaConfig(**mla) if mla else None))


@pytest.mark.parametrize("name", sorted(DATA["models"]))
def test_published_models_have_the_published_number_of_parameters(name: str) -> None:
    params = model_params(published.shape_of(name, DATA["models"][name]))
    computed = DATA["models"][name]["computed"]
    assert params.total / 1e9 == pytest.approx(computed["total"], rel=0.002)
    assert params.active / 1e9 == pytest.approx(computed["active"], rel=0.002)
    assert params.matmul / 1e9 == pytest.approx(computed["active_matmul"], rel=0.002)
    assert params.router / 1e9 == pytest.approx(computed["router"], abs=6e-5)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral_8x7b", 46.70, 12.88),
        ("mixtral_8x22b", 140.63, 39.16),
        ("qwen3_30b_a3b", 30.53, 3.353),
        ("qwen3_235b_a22b", 235.09, 22.19),
        ("deepseek_v2_lite", 15.71, 2.661),
        ("deepseek_v3", 671.03, 37.55),
        ("olmoe_1b_7b", 6.919, 1.282),
        ("gpt_oss_20b", 20.91, 4.19),  # OpenAI says 3.6 active: it leaves the input embedding (0.58) out
        ("gpt_oss_120b", 116.83, 5.71),  # OpenAI says 5.1, likewise
        ("moe_32x4096", 46.70, 12.88),
        ("moe_1t", 1100.1, 51.65),
    ],
)
def test_a_shipped_model_file_has_the_published_size(name: str, total: float, active: float) -> None:
    params = model_params(shape_from_file(name))
    assert params.total / 1e9 == pytest.approx(total, rel=0.002)
    assert params.active / 1e9 == pytest.approx(active, rel=0.002)


def test_mixtral_is_counted_to_the_last_parameter() -> None:
    assert model_params(shape_from_file("mixtral_8x7b")).total == 46_702_792_704  # by hand from the config's sizes


def test_tied_embeddings_are_counted_once_and_still_do_head_work() -> None:
    untied = Shape("u", vocab=100, hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=16, dense_layers=1)
    tied = Shape("t", vocab=100, hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=16, dense_layers=1, tied=True)
    assert model_params(untied).total - model_params(tied).total == 800
    assert model_params(untied).matmul == model_params(tied).matmul
