"""Translate captions: translators, a resumable translation job, and a quality report."""

from .chat import ChatTranslator, RateLimiter
from .jobs import Item, complete_translations, sample
from .quality import format_translation_report, load_sentence_encoder, report_translations
from .seq2seq import Seq2SeqTranslator, Translator

__all__ = [
    "ChatTranslator",
    "Item",
    "RateLimiter",
    "Seq2SeqTranslator",
    "Translator",
    "complete_translations",
    "format_translation_report",
    "load_sentence_encoder",
    "report_translations",
    "sample",
]
