// How much attention queries pay to each key: what attention_run weighs V by, summed over queries and heads.

#pragma once

#include "attention/attention.h"

namespace mixedkv {

// Adds the weights of all queries and heads to mass[key] for the keys of the first segment; those of the others count
// in the denominators only. Called by every thread 0 <= ith < nth, each with a `mass` of its own. One query at a time
// with F32 keys of a whole head: for a question over a long context, not for prefill.
void attention_mass(const attention_args & args, int ith, int nth, float * mass);

} // namespace mixedkv
