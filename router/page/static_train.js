// The same requests under static batching: a batch boards when the one before has ended, whole.
//
// Driven by a Train, column by column. A request boards here no sooner than there, so how long it rides is
// always known in time: it needs as many columns here as there.

const MAX_QUEUE = 5000;
const MAX_AWAY = 600; // columns after which a preempted request is given up: its client may have left

export class StaticTrain {
  rides = [];
  finished = 0;
  end = 0;
  #queue = [];
  #batch = [];
  #busy = []; // busy seats of each column
  #numSeats;

  constructor(train, numSeats, keep) {
    this.#numSeats = numSeats;
    this.end = train.end;
    train.onStart = (rider) => {
      if (this.#queue.length < MAX_QUEUE) this.#queue.push(rider);
    };
    train.onColumn = () => this.#step(keep);
    for (const ride of train.seated.values()) this.#queue.push(ride.rider);
  }

  /** Requests that have begun there and not here. */
  get numBehind() {
    return this.#queue.length;
  }

  #step(keep) {
    const column = this.end;
    if (this.#batch.every((ride) => ride.isOver)) this.#board();
    let busy = 0;
    for (const ride of this.#batch) {
      if (ride.isOver) continue;
      busy += 1;
      ride.columns += 1;
      const kind = ride.columns <= Math.max(1, ride.rider.chunks) ? "prefill" : "decode";
      const last = ride.segments.at(-1);
      if (kind === "decode" && last?.kind === kind) last.to = column + 1;
      else ride.segments.push({ kind, from: column, to: column + 1 });
      if (this.#hasEnded(ride.rider) && ride.columns >= ride.rider.columns) {
        ride.isOver = true;
        ride.to = column + 1;
        ride.reason = ride.rider.reason;
        this.finished += 1;
      }
    }
    this.#busy.push(busy);
    this.end += 1;
    if (this.#busy.length > keep) this.#busy.splice(0, this.#busy.length - keep);
    const first = this.end - this.#busy.length;
    if (this.rides[0]?.heldTo < first) this.rides = this.rides.filter((r) => r.heldTo === null || r.heldTo >= first);
  }

  #hasEnded({ endedAt, awaySince }) {
    return endedAt !== null || (awaySince !== null && this.end - awaySince > MAX_AWAY);
  }

  #board() {
    for (const ride of this.#batch) ride.heldTo = this.end;
    this.#batch = this.#queue.splice(0, this.#numSeats).map((rider, seat) => ({
      seat, rider, from: this.end, to: null, segments: [], reason: null, columns: 0, isOver: false, heldTo: null,
    }));
    this.rides.push(...this.#batch);
  }

  idleShare(span = 600) {
    const columns = this.#busy.slice(-span);
    if (!columns.length) return null;
    return 1 - columns.reduce((sum, busy) => sum + busy, 0) / (this.#numSeats * columns.length);
  }
}
