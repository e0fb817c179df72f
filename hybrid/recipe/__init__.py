"""Recipes: YAML files and `key=value` overrides -> a typed, checked `Recipe`. Nothing here builds a model."""

from .letters import LayerSpec, layer_specs
from .load import load, save, to_yaml
from .problems import RecipeError
from .reader import shipped
from .rules import Geometry, batch_geometry, check
from .schema import Recipe
from .typed import from_saved

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
