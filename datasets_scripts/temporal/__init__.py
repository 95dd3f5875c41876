"""Join clips in sequence or overlay them, for TeminAL training and for ZSTE, the zero-shot temporal evaluation."""
