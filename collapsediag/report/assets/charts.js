// Charts over steps. All of them share the window of steps, the cursor and the brush.

const charts = [];
const MARGIN = { left: 42, top: 14, bottom: 20 };
const HEIGHT = 168;
const WIDE_HEIGHT = 230;
const LABEL_HEIGHT = 13;

const withDraw = name => name && name.replace('{draw}', `collapse_${state.draw}_sample/`);

class Chart {
  // definition: one of the payload's charts. options.range: [low, high] of the axis, shared by small multiples.
  constructor(definition, options = {}) {
    this.definition = definition;
    this.options = options;
    this.height = options.height ?? (definition.gap ? WIDE_HEIGHT : HEIGHT);
    const [name, bad] = definition.title.split(/: (.*)/s);
    const title = el('h3', {}, bad ? `${name}: ` : name, bad ? el('em', {}, bad) : null);
    this.told = el('p', { class: definition.lines.length > 2 && !definition.is_wide ? 'told two-lines' : 'told' });
    this.plot = el('div', { class: 'plot' });
    const unit = ['ratio', 'count', 'fraction'].includes(definition.unit) ? '' : ` In ${definition.unit}.`;
    this.note = el('p', { class: 'note' }, definition.note + unit);
    this.figure = el('figure', { class: definition.is_wide ? 'chart wide' : 'chart', 'data-chart': definition.key }, title, this.told, this.plot, this.note);
    charts.push(this);
  }

  // Which curves to draw: of one run all lines, of several runs the first ones of each and the references of the chosen.
  curves() {
    const found = [];
    for (const one of shownRuns()) {
      this.definition.lines.forEach((line, i) => {
        if (isComparing() && i >= this.definition.n_overlaid && !(one.index === state.run && line.style === 'reference')) return;
        const name = withDraw(line.name);
        if (!one.columns[name]) return;
        const style = isComparing() && line.style !== 'reference' ? `run-${one.index % 8}` : line.style;
        const label = isComparing() && line.style !== 'reference' ? (this.definition.n_overlaid > 1 ? `${one.letter} ${line.label}` : one.letter) : line.label;
        const isBold = !isComparing() || one.index === state.run;
        found.push({ run: one, line, name, style, label, isBold, dash: isComparing() && i > 0, points: curve(one, name) });
      });
    }
    return found;
  }

  // available: width of the place for the plot, in pixels.
  draw(available) {
    const curves = this.curves();
    this.drawn = curves;
    this.figure.classList.toggle('missing', !curves.length);
    if (!curves.length) {
      this.plot.replaceChildren(el('p', { class: 'why' }, this.whyMissing()));
      setText(this.told, '');
      this.toX = null;
      return;
    }
    this.width = Math.max(220, Math.floor(available || 320));
    const longest = Math.max(...curves.map(one => one.label.length));
    this.right = this.width - clamp(longest * 6.4 + 12, 20, 92);
    const [from, to] = stepWindow();
    this.toX = step => MARGIN.left + ((step - from) / (to - from || 1)) * (this.right - MARGIN.left);
    this.toStep = x => from + ((x - MARGIN.left) / (this.right - MARGIN.left)) * (to - from);
    const [low, high] = this.options.range ?? this.range(curves);
    const bottom = this.height - MARGIN.bottom;
    this.toY = value => bottom - ((value - low) / (high - low || 1)) * (bottom - MARGIN.top);
    const picture = svg('svg', { viewBox: `0 0 ${this.width} ${this.height}`, role: 'img', 'aria-label': this.summary(curves) });
    const id = `inside-${charts.indexOf(this)}`;
    const clip = svg('clipPath', { id }, svg('rect', { x: MARGIN.left - 3, y: 0, width: this.right - MARGIN.left + 6, height: this.height }));
    const body = svg('g', { 'clip-path': `url(#${id})` }, ...this.areas(curves), ...curves.flatMap(one => this.lineNodes(one)));
    picture.append(clip, ...this.axes(low, high, from, to), ...this.marks(from, to), body, ...this.labels(curves), ...this.cursors());
    this.plot.replaceChildren(picture);
    this.listen(picture);
    this.moveCursor();
    this.tell();
  }

  range(curves) {
    const found = [Infinity, -Infinity];
    for (const { run: one, line, points } of curves) {
      extent(inside(points, stepWindow()).y, found);
      if (line.low && one.columns[withDraw(line.low)]) {
        extent(inside(curve(one, withDraw(line.low)), stepWindow()).y, found);
        extent(inside(curve(one, withDraw(line.high)), stepWindow()).y, found);
      }
    }
    extent(this.definition.reach ?? [], found);
    if (found[0] > found[1]) return [0, 1];
    if (found[0] === found[1]) return found[0] === 0 ? [0, 1] : [found[0] - 0.5, found[1] + 0.5];
    const pad = (found[1] - found[0]) * 0.04;
    // An axis that begins at 0 begins there exactly; so does one that ends at the largest possible share.
    return [found[0] === 0 ? 0 : found[0] - pad, this.definition.unit === 'fraction' && found[1] === 1 ? 1 : found[1] + pad];
  }

  axes(low, high, from, to) {
    const nodes = [];
    for (const value of ticks(low, high, this.height > 180 ? 4 : 3)) {
      const y = this.toY(value);
      nodes.push(svg('line', { class: value === 0 ? 'zero' : 'grid', x1: MARGIN.left, x2: this.right, y1: y, y2: y }));
      nodes.push(svg('text', { class: 'tick', x: MARGIN.left - 6, y: y + 3.5, 'text-anchor': 'end' }, number(value)));
    }
    const count = clamp(Math.floor((this.right - MARGIN.left) / 70), 2, 10);
    for (const step of stepTicks(from, to, count)) {
      nodes.push(svg('text', { class: 'tick', x: this.toX(step), y: this.height - 5, 'text-anchor': 'middle' }, number(step)));
    }
    return nodes;
  }

  // What happened: since when the verdict dates, and which steps failed.
  marks(from, to) {
    const one = run();
    const bottom = this.height - MARGIN.bottom;
    const nodes = one.failed.filter(([step]) => step >= from && step <= to).slice(0, 200).map(([step, reason]) => {
      const x = this.toX(step);
      const cross = svg('path', { class: 'failed', d: `M${x - 3} ${bottom - 3}l6 6m0 -6l-6 6` });
      cross.append(svg('title', {}, `step ${step} failed: ${visibleString(reason)}`));
      return cross;
    });
    const lead = one.verdict.findings.find(finding => finding.check === one.verdict.lead);
    if (lead?.since_step != null && lead.since_step >= from && lead.since_step <= to) {
      const x = this.toX(lead.since_step);
      nodes.push(svg('line', { class: 'since', x1: x, x2: x, y1: MARGIN.top - 4, y2: bottom }));
      const flip = x > this.right - 70;
      nodes.push(svg('text', { class: 'since', x: x + (flip ? -3 : 3), y: MARGIN.top - 4, 'text-anchor': flip ? 'end' : 'start' }, `since ${lead.since_step}`));
    }
    return nodes;
  }

  areas(curves) {
    const nodes = [];
    const width = this.right - MARGIN.left;
    const area = (low, high, style) => {
      const { x, low: lows, high: highs } = between(low, high, this.toX, width);
      if (x.length > 1) nodes.push(svg('path', { class: `area ${style}`, d: areaPath(x, lows, highs, this.toX, this.toY) }));
    };
    const { gap } = this.definition;
    if (gap && !isComparing() && curves.length === 2) area(curves[1].points, curves[0].points, 'gap');
    for (const { run: one, line, style, isBold } of curves) {
      // The band of the first line alone: more of them would hide each other.
      const hasBand = line === this.definition.lines[0] && line.low && one.columns[withDraw(line.low)];
      if (gap || !isBold || !hasBand) continue;
      area(curve(one, withDraw(line.low)), curve(one, withDraw(line.high)), style);
    }
    return nodes;
  }

  lineNodes({ points, style, line, isBold, dash, run: one }) {
    const thin = drawable(points, this.toX, this.right - MARGIN.left);
    const nodes = [];
    const hasBand = line.low && one.columns[withDraw(line.low)];
    if (thin.isDense && isBold && !hasBand) {
      nodes.push(svg('path', { class: `area ${style}`, d: areaPath(thin.x, thin.low, thin.high, this.toX, this.toY) }));
    }
    const classes = `line ${style}${isBold ? '' : ' faint'}${dash ? ' dashed' : ''}`;
    nodes.push(svg('path', { class: classes, d: linePath(thin.x, thin.y, this.toX, this.toY) }));
    // Few measured steps: show which they are.
    if (!thin.isDense && thin.x.length <= 60 && style !== 'reference') {
      const dots = Array.from(thin.x, (x, i) => `M${point(this.toX(x), this.toY(thin.y[i]))}h0`).join('');
      nodes.push(svg('path', { class: `dots ${style}${isBold ? '' : ' faint'}`, d: dots }));
    }
    return nodes;
  }

  labels(curves) {
    const placed = curves.flatMap(({ points, label, style, isBold }) => {
      const last = inside(points, stepWindow());
      if (!last.y.length) return [];
      return [{ y: this.toY(last.y[last.y.length - 1]), label, style: isBold ? style : `${style} faint` }];
    });
    return spread(placed, LABEL_HEIGHT, MARGIN.top, this.height - MARGIN.bottom).map(({ y, label, style }) =>
      svg('text', { class: `label ${style}`, x: this.right + 6, y: y + 4 }, label));
  }

  cursors() {
    const bottom = this.height - MARGIN.bottom;
    const line = name => svg('line', { class: name, y1: MARGIN.top, y2: bottom, x1: 0, x2: 0 });
    this.chosen = line('chosen');
    this.hovered = line('hovered');
    this.brush = svg('rect', { class: 'brush', y: MARGIN.top, height: bottom - MARGIN.top, width: 0, x: 0 });
    this.target = svg('rect', { class: 'target', x: MARGIN.left, y: 0, width: this.right - MARGIN.left, height: bottom });
    return [this.chosen, this.hovered, this.brush, this.target];
  }

  moveCursor() {
    if (!this.toX) return;
    const place = (line, step) => {
      const x = step === null ? -1 : this.toX(step);
      const isIn = x >= MARGIN.left - 0.5 && x <= this.right + 0.5;
      line.setAttribute('transform', `translate(${isIn ? x.toFixed(1) : 0} 0)`);
      line.setAttribute('visibility', isIn ? 'visible' : 'hidden');
    };
    place(this.chosen, state.step);
    place(this.hovered, state.hover);
  }

  // The values at the step under the pointer, or at the chosen step.
  tell() {
    if (!this.toX) return;
    const { steps } = run();
    const step = state.hover ?? state.step ?? steps[steps.length - 1];
    const parts = this.drawn.map(({ run: one, line, name, label }) => {
      const value = valueAt(one, name, step);
      const [low, high] = [line.low, line.high].map(end => (end ? valueAt(one, withDraw(end), step) : null));
      return `${label} ${number(value)}${value !== null && low !== null ? ` [${number(low)}, ${number(high)}]` : ''}`;
    });
    setText(this.told, `step ${step}   ${parts.join('   ')}`);
  }

  listen(picture) {
    let from = null;
    const stepAt = event => {
      const box = picture.getBoundingClientRect();
      return this.toStep(((event.clientX - box.left) / box.width) * this.width);
    };
    this.target.addEventListener('pointermove', event => {
      const step = stepAt(event);
      hover(nearestRecorded(step));
      if (from === null) return;
      const ends = [this.toX(from), this.toX(step)].sort((a, b) => a - b);
      this.brush.setAttribute('x', ends[0]);
      this.brush.setAttribute('width', ends[1] - ends[0]);
    });
    this.target.addEventListener('pointerleave', () => from === null && hover(null));
    this.target.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      from = stepAt(event);
      this.target.setPointerCapture(event.pointerId);
    });
    this.target.addEventListener('pointerup', event => {
      if (from === null) return;
      const ends = [from, stepAt(event)].sort((a, b) => a - b);
      const isDrag = this.toX(ends[1]) - this.toX(ends[0]) > 6;
      from = null;
      this.brush.setAttribute('width', 0);
      if (isDrag) zoomTo(ends);
      else if (run().shownSteps.length) update({ step: nearestStep(run().shownSteps, ends[0]) });
    });
    this.target.addEventListener('pointercancel', () => {
      from = null;
      this.brush.setAttribute('width', 0);
    });
    this.target.addEventListener('dblclick', () => update({ zoom: null }));
  }

  summary(curves) {
    const parts = curves.map(({ points, label }) => {
      const end = points.x.length - 1;
      return end < 0 ? '' : `${label} from ${number(points.y[0])} at step ${points.x[0]} to ${number(points.y[end])} at step ${points.x[end]}`;
    });
    return `${this.definition.title}. ${parts.filter(Boolean).join('; ')}.`;
  }

  whyMissing() {
    const name = withDraw(this.definition.lines[0].name).replace(/pass@\d+/, 'pass@k');
    return `Not measured, because ${visibleString(run().reasons[name] ?? 'this run did not record it')}.`;
  }
}

function zoomTo([low, high]) {
  const [first, last] = stepRange();
  update({ zoom: [Math.max(first, Math.round(low)), Math.min(last, Math.max(Math.round(high), Math.round(low) + 1))], hover: null });
}

function nearestRecorded(step) {
  const { steps } = run();
  const index = clamp(lowerBound(steps, step), 0, steps.length - 1);
  return index > 0 && step - steps[index - 1] < steps[index] - step ? steps[index - 1] : steps[index];
}

// Pointers move more often than screens are drawn.
let hoverPending = false;
let hoverNext = null;
function hover(step) {
  hoverNext = step;
  if (hoverPending) return;
  hoverPending = true;
  requestAnimationFrame(() => {
    hoverPending = false;
    update({ hover: hoverNext });
  });
}

// All widths first: one that is asked for between two drawings makes the browser lay out the page again.
function drawCharts(drawn = charts) {
  const widths = drawn.map(chart => chart.plot.clientWidth);
  drawn.forEach((chart, i) => chart.draw(widths[i]));
}

function followCharts() {
  on(['zoom', 'hidden', 'draw', 'run'], () => drawCharts());
  on(['step', 'hover'], () => charts.forEach(chart => {
    chart.moveCursor();
    chart.tell();
  }));
}

function makeCharts() {
  charts.length = 0;
  ['dependence', 'signal', 'behaviour'].forEach(sectionCharts);
}

function sectionCharts(section) {
  const holder = byId(section);
  const definitions = new Map();
  // Runs differ in their k of pass@k: the definition that has the most lines serves all.
  for (const one of page.runs) {
    for (const definition of one.charts.filter(chart => chart.section === section)) {
      const known = definitions.get(definition.key);
      if (!known || known.lines.length < definition.lines.length) definitions.set(definition.key, definition);
    }
  }
  holder.replaceChildren(...[...definitions.values()].map(definition => new Chart(definition).figure));
}
