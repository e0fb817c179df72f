"""Train hybrid language models whose layers are mixed by a pattern string."""

from hybrid.convert.hf import register

register.install()
