"""Translate captions: translators, a resumable translation job, and a quality report."""

from .chat import ChatTranslator
from .seq2seq import Seq2SeqTranslator, Translator

__all__ = ["ChatTranslator", "Seq2SeqTranslator", "Translator"]
