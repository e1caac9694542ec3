"""Read trained models: what their heads look at, their token kernels, their training.

Everything here takes a model and a batch and gives small tables, which pandas and matplotlib take;
`mercer inspect` puts them on a page. Importing needs torch alone.
"""

from .classify import Score as Score
from .classify import classify as classify
from .classify import compare as compare
from .curves import Curve as Curve
from .curves import Curves as Curves
from .curves import curves as curves
from .dendrogram import draw_dendrogram as draw_dendrogram
from .effects import Cell as Cell
from .effects import TagEffect as TagEffect
from .effects import by_layer_and_head as by_layer_and_head
from .effects import count_ids as count_ids
from .effects import partial_rank_correlation as partial_rank_correlation
from .effects import tag_effect as tag_effect
from .heads import Heads as Heads
from .heads import HeadSummary as HeadSummary
from .heads import heads as heads
from .largest import LargestRow as LargestRow
from .largest import LargestRows as LargestRows
from .largest import largest as largest
from .ngrams import NGrams as NGrams
from .ngrams import ngram_distances as ngram_distances
from .page import make_page as make_page
from .page import write_page as write_page
from .positions import DistanceWeight as DistanceWeight
from .positions import DistanceWeights as DistanceWeights
from .positions import by_distance as by_distance
from .queries import Spread as Spread
from .queries import Spreads as Spreads
from .queries import query_bandwidths as query_bandwidths
from .queries import spreads as spreads
from .records import Records as Records
from .report import Report as Report
from .report import distances_between as distances_between
from .report import name_apart as name_apart
from .rows import LayerRows as LayerRows
from .rows import Rows as Rows
from .rows import rows as rows
from .stored import stored_bandwidths as stored_bandwidths
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
from .tokens import PUBLISHED as PUBLISHED
from .tokens import TagSummaries as TagSummaries
from .tokens import TagSummary as TagSummary
from .tokens import TokenKernel as TokenKernel
from .tokens import Tokens as Tokens
from .tokens import find_token_kernels as find_token_kernels
from .tokens import summarise_tags as summarise_tags
from .tokens import tags_by_id as tags_by_id
from .tokens import tokens as tokens
from .tokens import words_from as words_from
