"""What each node would do again at its start: the server of forked processes imports this once, before all of them."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# thousands of regular expressions
get_checkpoint_conversion_mapping("sam3")
# a collection in a fork would copy the pages of all modules
gc.collect()
gc.freeze()
