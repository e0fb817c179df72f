"""Small models of ours as models of transformers."""

import torch

from hybrid.convert.common import complete
from hybrid.convert.hf.configuration import HybridConfig
from hybrid.convert.hf.modeling import HybridForCausalLM
from tests.hybrid.mini import mini

ALL_KINDS = "KFWBRGDMQ"


def hf_mini(pattern="KRWF", **changes) -> HybridForCausalLM:
    """The mini model; its padding id is its end id, as in the folders that are written."""
    ours = mini(pattern, **changes)
    config = HybridConfig.of_section(complete(ours.section), bos_token_id=1, eos_token_id=1, pad_token_id=1)
    model = HybridForCausalLM(config)
    model.model.load_state_dict(ours.state_dict())
    return model.eval()


def left_padded(rows):
    """Rows of unequal length as ids and mask `[B, T]`."""
    longest = max(map(len, rows))
    ids, mask = torch.ones(2, len(rows), longest, dtype=torch.long).unbind()
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, : longest - len(row)] = 0
    return ids, mask
