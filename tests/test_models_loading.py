"""Loading: what cannot be loaded is refused in one line, and what is loaded has no hidden noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openrlhf_like.models.loading import check_model_path, load_causal_lm
from openrlhf_like.types import UserError
from tests.tiny import build_tiny_model

FLAG = "--actor.model_name_or_path"


def test_missing_path_names_the_flag(tmp_path: Path) -> None:
    for path in (None, "", str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(UserError, match=FLAG) as e:
            check_model_path(path, FLAG)
        assert "\n" not in str(e.value)
    check_model_path("owner/name", FLAG)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json"):
        load_causal_lm(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    with pytest.raises(UserError, match=FLAG) as e:
        load_causal_lm(str(tmp_path))
    assert "\n" not in str(e.value)


def test_dropout_is_off_in_every_module_and_the_config_keeps_it(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "tiny")
    config = json.loads((Path(path) / "config.json").read_text())
    config["attention_dropout"] = 0.5
    (Path(path) / "config.json").write_text(json.dumps(config))
    ids = torch.arange(10).unsqueeze(0)
    noisy = load_causal_lm(str(path)).train()
    assert not torch.equal(noisy(input_ids=ids).logits, noisy(input_ids=ids).logits)
    quiet = load_causal_lm(str(path), disable_dropout=True).train()
    assert torch.equal(quiet(input_ids=ids).logits, quiet(input_ids=ids).logits)
    assert quiet.config.attention_dropout == 0.5
