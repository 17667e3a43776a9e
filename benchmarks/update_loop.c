/* Makes a whole update in one call: our kernel over all chunks in forward order, without lanes, events or Python. */
#include "spillway.h"

struct piece {
  spillway_states states;
  const float* gradient;
  void* out; /* bfloat16 */
  int64_t n;
};

void update_loop(__typeof__(&spillway_update) update, const spillway_update_scalars* scalars,
                 const struct piece* pieces, int64_t num_pieces, int32_t isa) {
  for (const struct piece* at = pieces; at < pieces + num_pieces; ++at) {
    update(SPILLWAY_ADAMW, scalars, &at->states, &at->states, SPILLWAY_FLOAT32, 0, at->gradient, SPILLWAY_FLOAT32,
           at->out, SPILLWAY_BFLOAT16, at->n, isa, 1);
  }
}
