// One replica's steps as a picture: who sat where, column by column. No drawing, no clock.

export const MAX_COLUMNS = 1500;

/** A request's life, over all its rides. */
class Rider {
  constructor([, key, tier, prompt, cached, output, maxOutput, preemptions, waitedMs, id]) {
    Object.assign(this, { key, tier, prompt, cached, output, maxOutput, preemptions, waitedMs, id });
    this.wasAboard = output > 0; // before we watched
    this.columns = 0; // in which something was computed for it
    this.chunks = 0;
    this.startedAt = null; // seconds, as all instants here
    this.firstTokenAt = null;
    this.endedAt = null;
    this.awaySince = null; // column at which it was preempted, while it waits
    this.reason = null;
  }
}

/** Seats, columns and rides of one replica. A ride is a rider's time in a seat: segments of one kind. */
export class Train {
  columns = []; // the newest last
  rides = []; // in the order in which they began
  seated = new Map(); // seat -> ride
  end = 0; // number of the column that comes next
  numPreemptions = 0;
  numChunked = 0; // prompts that took more than one chunk
  onStart = () => {};
  onColumn = () => {};
  #riders = new Map();
  #lastNumber = null;

  get first() {
    return this.end - this.columns.length;
  }

  column(number) {
    return this.columns[number - this.first];
  }

  /** Take the answer to one question: records, after the riders of that moment where they are given. */
  take([, records, riders], keep = MAX_COLUMNS) {
    if (riders) this.#restart(riders);
    for (const record of records) this.#takeRecord(record);
    this.#forget(keep);
  }

  /** Go on after records that were missed: who still sits where they sat rides on. */
  #restart(riders) {
    const boarding = new Map(riders.map((fields) => [fields[1], fields]));
    for (const [seat, ride] of this.seated) {
      const fields = boarding.get(ride.rider.key);
      if (fields?.[0] === seat) {
        ride.rider.output = fields[5];
        boarding.delete(ride.rider.key);
        continue;
      }
      ride.to = this.end;
      this.seated.delete(seat);
      if (fields) continue; // in another seat
      ride.rider.endedAt = this.columns.at(-1)?.at ?? 0;
      this.#riders.delete(ride.rider.key);
    }
    this.#lastNumber = null;
    for (const fields of boarding.values()) this.#board(fields, null);
  }

  #takeRecord([number, at, ms, waiting, used, overloaded, left, started, chunks, idle, finished]) {
    for (const [seat, reason, output] of left) this.#leave(seat, reason, output, at, this.end);
    if (number >= 0) {
      for (const rider of started) this.#board(rider, at - ms / 1000);
      const steps = this.#lastNumber === null ? 1 : number - this.#lastNumber;
      this.#lastNumber = number;
      this.#compute(new Map(chunks.map((chunk) => [chunk[0], chunk])), new Set(idle), steps, at);
      const prefill = chunks.reduce((sum, chunk) => sum + chunk[1], 0);
      const busy = [...this.seated.keys()].filter((seat) => !idle.includes(seat)).length;
      this.columns.push({ number, at, ms, waiting, used, overloaded, busy, prefill });
      this.end += 1;
    }
    for (const [seat, reason, output] of finished) this.#leave(seat, reason, output, at, this.end);
    if (number >= 0) this.onColumn(this.columns.at(-1));
  }

  #board(fields, at) {
    const [seat, key] = fields;
    let rider = this.#riders.get(key);
    if (rider) rider.preemptions = fields[7];
    else {
      rider = new Rider(fields);
      this.#riders.set(key, rider);
      this.onStart(rider);
    }
    rider.startedAt ??= at;
    rider.reason = rider.awaySince = null;
    const ride = { seat, rider, from: this.end, to: null, segments: [], reason: null };
    this.seated.set(seat, ride);
    this.rides.push(ride);
  }

  #compute(chunks, idle, steps, at) {
    for (const [seat, ride] of this.seated) {
      const { rider, segments } = ride;
      const chunk = chunks.get(seat);
      const kind = chunk ? "prefill" : idle.has(seat) ? "idle" : "decode";
      const last = segments.at(-1);
      if (kind !== "prefill" && last?.kind === kind) last.to = this.end + 1;
      else segments.push({ kind, from: this.end, to: this.end + 1, tokens: chunk?.[1] });
      if (kind !== "idle") rider.columns += 1;
      if (chunk) rider.chunks += 1;
      if (chunk && rider.chunks === 2) this.numChunked += 1;
      const made = kind === "decode" ? steps : chunk?.[2] === 0 ? 1 : 0;
      if (made && !rider.wasAboard) rider.firstTokenAt ??= at;
      rider.output += made;
    }
  }

  #leave(seat, reason, output, at, column) {
    const ride = this.seated.get(seat);
    if (!ride) return;
    this.seated.delete(seat);
    ride.to = column;
    ride.reason = ride.rider.reason = reason;
    ride.rider.output = output;
    if (reason === "preempted") {
      this.numPreemptions += 1;
      ride.rider.awaySince = column;
      return;
    }
    ride.rider.endedAt = at;
    this.#riders.delete(ride.rider.key);
  }

  #forget(keep) {
    if (this.columns.length > keep) this.columns.splice(0, this.columns.length - keep);
    if (this.rides.length && this.rides[0].to !== null && this.rides[0].to < this.first)
      this.rides = this.rides.filter((ride) => ride.to === null || ride.to >= this.first);
  }

  /** The ride in a seat at a column; undefined for an empty seat. */
  rideAt(seat, column) {
    return this.rides.findLast((r) => r.seat === seat && r.from <= column && (r.to === null || column < r.to));
  }

  /** Share of the seats without work, over the last columns. */
  idleShare(numSeats, span = 600) {
    const columns = this.columns.slice(-span);
    if (!columns.length || !numSeats) return null;
    return 1 - columns.reduce((sum, column) => sum + column.busy, 0) / (numSeats * columns.length);
  }
}
