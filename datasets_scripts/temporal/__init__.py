"""Clips of two sounds, in sequence or overlaid: TeminAL's training items and the questions of ZSTE."""
