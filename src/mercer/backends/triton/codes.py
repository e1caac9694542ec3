"""Numbers that kernels and the files that launch them share. This file imports nothing."""

# FORM: how a kernel computes its weights. In general; as the exponential of one dot product; as an
# integer power of it; as a link whose weights are summed without a running maximum.
FORMS = GENERAL, PLAIN, POLY, FLAT = range(4)

# The links, as kernels know them.
LINKS = IDENTITY, POWER, RATIONAL, MATERN12, MATERN32, MATERN52 = range(6)

# INSIDE: what the forward for few queries computes from a block of keys itself: nothing, the norms
# of a distance, or the lengths of features (of queries too) that products are divided by.
NOTHING, NORMS, LENGTHS = 0, 1, 2
NOWHERE = (NOTHING, NOTHING)  # for both slots

# HAS_COL in place of True: there are numbers per key, and each head of a group has its own.
EACH = 2

# The bands of this many queries begin with the same key. Blocks of pairs are not larger.
GRANULE = 64
# Queries of a program that reads bands by distance are this far apart, so that rows stay aligned:
# 8 numbers in half precision are 16 bytes.
EVERY = 8

# At most so many queries count as few. Their keys are cut into parts, none shorter than PART.
SPLIT_QUERIES, PART = 16, 512
