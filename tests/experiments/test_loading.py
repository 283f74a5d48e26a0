"""Loading from several threads leaves the library as it was."""

from __future__ import annotations

from pathlib import Path

import transformers as hf

from actmat_experiments.harness.training import side_by_side
from actmat_experiments.vision.backbones import PLAIN_SCALE, Backbone


def test_loads_in_threads_leave_weights_tied_in_later_models(tmp_path: Path) -> None:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    hf.ViTModel(hf.ViTConfig(**tiny, image_size=8, patch_size=4), add_pooling_layer=False).save_pretrained(tmp_path)
    backbone = Backbone("vit", 8, PLAIN_SCALE)
    before = hf.PreTrainedModel.tie_weights
    side_by_side(lambda i: backbone.load(tmp_path), range(40), threads=4)
    assert hf.PreTrainedModel.tie_weights is before
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=4))
    assert model.lm_head.weight is model.transformer.wte.weight
