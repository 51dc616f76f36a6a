// The votes for each answer: of the samples of a method, or of the probes of a chain.

/** Votes that are counted as they come. */
export class Poll {
  /** @param {string} branch path of the branch that counts them @param {"votes" | "probes"} kind */
  constructor(branch, kind) {
    this.branch = branch;
    this.kind = kind;
    /** @type {Map<string, number>} votes, or their weight, by answer */
    this.tally = new Map();
    /** @type {Map<string, string>} answer by the path of the branch that gave it */
    this.voters = new Map();
    /** @type {string | null} the answer that has won; null: the vote goes on, or has no winner */
    this.winner = null;
    this.isOver = false;
    /** Why it is over, in the method's words. */
    this.why = "";
  }

  /**
   * Takes in a vote.
   * @param {string} voter path of its branch
   * @param {{answer: any, tally?: Record<string, number>, weight?: number}} vote `tally`: all so far
   */
  add(voter, { answer, tally, weight = 1 }) {
    if (voter) this.voters.set(voter, String(answer));
    if (tally) this.take(tally);
    else this.tally.set(String(answer), (this.tally.get(String(answer)) ?? 0) + Number(weight));
  }

  /** Takes in the end of the vote. @param {{answer: any, tally?: Record<string, number>}} vote @param {string} [why] */
  end({ answer, tally }, why = "") {
    this.why = why;
    if (tally && Object.keys(tally).length) this.take(tally);
    this.winner = answer === null || answer === undefined ? null : String(answer);
    this.isOver = true;
  }

  /** @private @param {Record<string, number>} tally */
  take(tally) {
    this.tally = new Map(Object.entries(tally).map(([answer, votes]) => [answer, Number(votes)]));
  }

  /** Answers and their votes, the winner and then the most frequent first. @returns {[answer: string, votes: number, share: number][]} */
  get ranking() {
    const total = [...this.tally.values()].reduce((sum, votes) => sum + votes, 0);
    const rows = [...this.tally].map(([answer, votes]) => /** @type {[string, number, number]} */ ([answer, votes, total ? votes / total : 0]));
    return rows.sort((a, b) => Number(b[0] === this.winner) - Number(a[0] === this.winner) || b[1] - a[1]);
  }

  /** The answer that wins or leads, and its votes; null: there is no vote. */
  get leader() {
    return this.ranking[0] ?? null;
  }

  /** The first branch that gave the winning answer. @returns {string | null} */
  get winningBranch() {
    return [...this.voters].find(([, answer]) => answer === this.winner)?.[0] ?? null;
  }
}
