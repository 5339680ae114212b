"""Names what a row is, as `mixedkv_truth` of the C API does, from best to worst."""

COMPUTED, APPROXIMATE, INCOMPLETE, FOREIGN, DOUBTED = range(5)
