"""Attention operators that take the place of a timm block's `attn`: one operator, one paper, one file."""

from linvit.attention.base import Attention, GeometryError, is_own

__all__ = ["Attention", "GeometryError", "is_own"]
