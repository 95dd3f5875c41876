"""Combine clips in sequence or overlaid, for TeminAL training and ZSTE, the zero-shot temporal evaluation."""
