// Cumulative counts -> what came in the last minute.

const SPAN_MS = 60_000;

/** Keeps boards of the last minute. Another router has other counts: then it begins anew. */
export class Window {
  #boards = [];

  add(board, now) {
    if (this.#boards.at(-1)?.board.router !== board.router) this.#boards = [];
    this.#boards.push({ board, now });
    // One that is older stays, to take the difference to.
    while (this.#boards.length > 2 && now - this.#boards[1].now >= SPAN_MS) this.#boards.shift();
  }

  /** The newest tiers with TTFT and ITL P99, in ms, and the attainment of the minute; null = no data. */
  tiers() {
    const { board } = this.#boards.at(-1);
    const before = this.#boards[0].board.tiers;
    return board.tiers.map((tier, rank) => {
      const old = before[rank];
      const kept = tier.num_kept - old.num_kept;
      const ended = kept + tier.num_broken - old.num_broken;
      return {
        ...tier,
        rank,
        ttft: quantile(0.99, board.ttft_edges_ms, difference(tier.ttft_counts, old.ttft_counts)),
        itl: quantile(0.99, board.itl_edges_ms, difference(tier.itl_counts, old.itl_counts)),
        attainment: ended ? kept / ended : null,
        refused: tier.num_refused - old.num_refused,
      };
    });
  }
}

const difference = (now, before) => now.map((count, index) => count - before[index]);

/** As router/histogram.py: linear within a bucket; above the last edge counts as that edge. */
export function quantile(share, edges, counts) {
  const rank = share * counts.reduce((sum, count) => sum + count, 0);
  if (!rank) return null;
  let below = 0;
  for (let index = 0; index < edges.length; index++) {
    if (counts[index] && below + counts[index] >= rank) {
      const low = index ? edges[index - 1] : 0;
      return low + ((edges[index] - low) * (rank - below)) / counts[index];
    }
    below += counts[index];
  }
  return edges.at(-1);
}
