"""Recipes: YAML files and `key=value` overrides -> a typed, checked `Recipe`. Nothing here builds a model."""

from .letters import LayerSpec, layer_specs
from .load import from_saved, load, save, to_yaml
from .reader import RecipeError, shipped
from .rules import Geometry, batch_geometry, check
from .schema import Recipe

__all__ = [
    "Geometry",
    "LayerSpec",
    "Recipe",
    "RecipeError",
    "batch_geometry",
    "check",
    "from_saved",
    "layer_specs",
    "load",
    "save",
    "shipped",
    "to_yaml",
]
