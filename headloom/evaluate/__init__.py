"""Measures of a trained model on text it has not seen."""

from headloom.evaluate.bits import BitsPerByte, Total, bits_per_byte

__all__ = ["BitsPerByte", "Total", "bits_per_byte"]
