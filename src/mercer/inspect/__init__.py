"""Inspect trained models: token kernels by part of speech, and as the style of a corpus."""

from .classify import Score as Score
from .classify import classify as classify
from .classify import compare as compare
from .dendrogram import draw_dendrogram as draw_dendrogram
from .effects import Cell as Cell
from .effects import TagEffect as TagEffect
from .effects import by_layer_and_head as by_layer_and_head
from .effects import count_ids as count_ids
from .effects import partial_rank_correlation as partial_rank_correlation
from .effects import tag_effect as tag_effect
from .ngrams import NGrams as NGrams
from .ngrams import ngram_distances as ngram_distances
from .style import Distances as Distances
from .style import Features as Features
from .style import distances as distances
from .style import kernel_features as kernel_features
from .style import shared_ids as shared_ids
from .style import word_frequencies as word_frequencies
from .tags import Row as Row
from .tags import Tags as Tags
from .tags import by_tag as by_tag
from .tags import rank_correlation as rank_correlation
from .tags import read_conllu as read_conllu
from .tags import tag_words as tag_words
from .tags import words_in as words_in
from .tags import words_of as words_of
