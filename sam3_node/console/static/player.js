// The clock of a recording: it asks for the frame that is due, and so passes over frames on a slow page.

/** Plays the rows of a timeline. `show(index)` asks for a frame, `refresh` shows whether it plays. */
export class Player {
  constructor({ timeline, show, say, refresh }) {
    Object.assign(this, { timeline, ask: show, say, refresh });
    this.index = 0;
    this.timer = null;
  }

  show(index) {
    this.index = index;
    this.ask(index);
    this.timeline.showRecorded(index);
  }

  /** Go to a frame, and stop there. */
  goTo(index) {
    this.stop();
    this.show(index);
  }

  toggle() {
    if (this.timer) this.stop();
    else this.play();
    this.refresh();
  }

  play() {
    const { rows } = this.timeline;
    if (this.index >= rows.length - 1) this.index = 0;
    const [begin, beginS] = [performance.now(), rows[this.index]?.s ?? 0];
    const tick = () => {
      const now = beginS + (performance.now() - begin) / 1000;
      let index = this.index;
      while (index + 1 < rows.length && rows[index + 1].s <= now) index++;
      if (index !== this.index) this.show(index);
      if (index + 1 >= rows.length) this.stop();
      else this.timer = requestAnimationFrame(tick);
    };
    this.timer = requestAnimationFrame(tick);
  }

  stop() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
  }

  /** Go to the next frame that satisfies a condition. */
  jump(matches, what) {
    const index = this.timeline.findNext(matches);
    if (index === null) this.say(`No frame with ${what}.`);
    else this.goTo(index);
  }
}
