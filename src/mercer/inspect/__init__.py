"""Inspect trained models: token kernels by part of speech."""

from .tags import Row as Row
from .tags import Tags as Tags
from .tags import by_tag as by_tag
from .tags import rank_correlation as rank_correlation
from .tags import read_conllu as read_conllu
from .tags import tag_words as tag_words
from .tags import words_in as words_in
from .tags import words_of as words_of
