"""Two sounds, one after the other or at once: TeminAL's training items and the questions of its evaluation."""
