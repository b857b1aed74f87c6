// The regime map: how much the reasoning varies against how much of that is about the prompt, one dot a scored step.

const MAP_MARGIN = { left: 50, right: 14, top: 10, bottom: 38 };
const REGIONS = [
  { name: 'compressed reasoning', x: 0, y: 1, class: 'compressed' },
  { name: 'diverse reasoning', x: 1, y: 1, class: 'diverse' },
  { name: 'low-entropy collapse', x: 0, y: 0, class: 'low-entropy' },
  { name: 'template collapse', x: 1, y: 0, class: 'template' },
];

class RegimeMap {
  constructor() {
    this.figure = byId('regime-map');
    this.plot = el('div', { class: 'plot' });
    this.told = el('p', { class: 'told' });
    const title = el('h3', {}, 'Path over the regime map: ', el('em', {}, 'bad when it sinks'));
    this.note = el('p', { class: 'note' });
    this.figure.replaceChildren(title, this.told, this.plot, this.note);
    on(['draw', 'run', 'hidden'], () => this.draw());
    on(['step', 'hover'], () => this.mark());
  }

  paths() {
    return shownRuns()
      .map(one => ({ run: one, points: one.regimes[state.draw]?.points ?? [] }))
      .filter(({ points }) => points.length);
  }

  draw() {
    const paths = this.paths();
    this.toX = null;
    if (!paths.length) {
      const reason = run().reasons[`collapse_${state.draw}_sample/mi_seq_estimate`] ?? 'no scored step has both numbers';
      this.plot.replaceChildren(el('p', { class: 'why' }, `Not measured, because ${visibleString(reason)}.`));
      setText(this.told, '');
      setText(this.note, '');
      return;
    }
    this.width = Math.max(260, Math.floor(this.plot.clientWidth || 420));
    this.height = clamp(Math.round(this.width * 1.12), 300, 540);
    const { borders } = run().regimes[state.draw] ?? {};
    this.scale(paths, borders);
    const picture = svg('svg', { viewBox: `0 0 ${this.width} ${this.height}`, role: 'img', 'aria-label': this.summary(paths) });
    this.ring = svg('circle', { class: 'ring', r: 8 });
    picture.append(...this.regions(borders), ...this.axes(), ...paths.flatMap(path => this.path(path)), this.ring);
    this.plot.replaceChildren(picture);
    const { conditional_entropy_low: low, dependence_low: lowest } = run().verdict.settings;
    const how = borders?.is_chance
      ? `Borders: ${low} of the H(Z|X) of this run\u2019s own first scored steps, and the most I(X; Z) of a step at chance, as those are.`
      : `Borders: ${low} and ${lowest} of this run\u2019s own first scored steps.`;
    const chance = isComparing() ? 'Retrieval at chance counts' : 'Red dots: retrieval at chance, which counts';
    setText(this.note, borders ? `${how} ${chance} as low wherever the dot is.` : 'No borders yet: too few scored steps for a baseline.');
    this.mark();
  }

  scale(paths, borders) {
    const x = extent(paths.flatMap(({ points }) => points.map(p => p[1])));
    const y = extent(paths.flatMap(({ points }) => points.map(p => p[2])));
    extent(borders ? [borders.entropy] : [], x);
    extent(borders ? [borders.mi, 0] : [0], y);
    // Noise around 0 stays small beside what there could be.
    y[1] = Math.max(y[1], y[0] + Math.max(...paths.map(path => path.run.regimes[state.draw].mi_range)));
    const pad = [(x[1] - x[0] || 1) * 0.14, (y[1] - y[0] || 1) * 0.15];
    const high = [x[1] + pad[0], y[1] + pad[1]];
    const low = [Math.max(0, x[0] - pad[0]), y[0] - pad[1]];
    // The region of low entropy keeps a quarter of the width, also while nothing is in it.
    if (borders) low[0] = clamp(borders.entropy - (high[0] - borders.entropy) / 3, 0, low[0]);
    Object.assign(this, { low, high });
    this.right = this.width - MAP_MARGIN.right;
    this.bottom = this.height - MAP_MARGIN.bottom;
    this.toX = value => MAP_MARGIN.left + ((value - low[0]) / (high[0] - low[0])) * (this.right - MAP_MARGIN.left);
    this.toY = value => this.bottom - ((value - low[1]) / (high[1] - low[1])) * (this.bottom - MAP_MARGIN.top);
  }

  regions(borders) {
    if (!borders) return [];
    const xs = [MAP_MARGIN.left, this.toX(borders.entropy), this.right];
    const ys = [this.bottom, this.toY(borders.mi), MAP_MARGIN.top];
    const drawn = REGIONS.map(region => {
      const [x, width] = [xs[region.x], xs[region.x + 1] - xs[region.x]];
      const [y, height] = [ys[region.y + 1], ys[region.y] - ys[region.y + 1]];
      const label = { class: `region-name ${region.class}`, x: region.x ? x + width - 7 : x + 7, 'text-anchor': region.x ? 'end' : 'start' };
      const lines = width < 140 ? region.name.split(' ') : [region.name];
      const top = region.y ? y + 16 : y + height - 8 - (lines.length - 1) * 13;
      return {
        area: svg('rect', { class: `region ${region.class}`, x, y, width, height }),
        names: lines.map((line, i) => svg('text', { ...label, y: top + 13 * i }, line)),
      };
    });
    return [...drawn.map(({ area }) => area), ...drawn.flatMap(({ names }) => names)];
  }

  axes() {
    const nodes = [svg('path', { class: 'frame', d: `M${MAP_MARGIN.left} ${MAP_MARGIN.top}V${this.bottom}H${this.right}` })];
    for (const value of ticks(this.low[0], this.high[0], 5)) {
      nodes.push(svg('text', { class: 'tick', x: this.toX(value), y: this.bottom + 14, 'text-anchor': 'middle' }, number(value)));
    }
    for (const value of ticks(this.low[1], this.high[1], 5)) {
      nodes.push(svg('text', { class: 'tick', x: MAP_MARGIN.left - 6, y: this.toY(value) + 3.5, 'text-anchor': 'end' }, number(value)));
    }
    nodes.push(svg('text', { class: 'axis', x: this.right, y: this.height - 4, 'text-anchor': 'end' }, 'how much reasoning varies for one prompt: H(Z|X), nats/token \u2192'));
    nodes.push(svg('text', { class: 'axis', x: 10, y: MAP_MARGIN.top, transform: `rotate(-90 10 ${MAP_MARGIN.top})`, 'text-anchor': 'end' }, 'how much it says about the prompt: I(X; Z), nats \u2192'));
    return nodes;
  }

  path({ run: one, points }) {
    const place = p => [this.toX(p[1]), this.toY(p[2])];
    const style = isComparing() ? `run-${one.index % 8}` : 'main';
    const faint = isComparing() && one.index !== state.run ? ' faint' : '';
    const nodes = [svg('path', { class: `line ${style} path${faint}`, d: points.map((p, i) => (i ? 'L' : 'M') + point(...place(p))).join('') })];
    points.forEach((p, i) => {
      const [cx, cy] = place(p);
      const collapsed = /collapse/.test(p[3] ?? '') ? ' collapsed' : '';
      const chance = p[4] && !isComparing() ? ' chance' : '';
      const dot = svg('circle', { class: `dot ${style}${collapsed}${chance}${faint}`, cx, cy, r: i === points.length - 1 ? 4.5 : 3 });
      dot.append(svg('title', {}, `${isComparing() ? `${one.name}, ` : ''}step ${p[0]}: ${p[3] ?? 'too early to name'}${p[4] ? ', retrieval at chance' : ''}`));
      dot.addEventListener('click', () => update({ run: one.index, step: nearestStep(one.shownSteps, p[0]) }));
      nodes.push(dot);
    });
    const ends = points.length > 1 ? [points[0], points[points.length - 1]] : [points[0]];
    const labels = ends.map(p => ({ x: place(p)[0], y: place(p)[1] - 9, text: isComparing() ? one.letter : `step ${p[0]}` }));
    if (isComparing()) labels.shift();
    for (const { x, y, text } of spread(labels, 15, MAP_MARGIN.top + 12, this.bottom - 4)) {
      const anchor = x > this.right - 60 ? 'end' : x < MAP_MARGIN.left + 40 ? 'start' : 'middle';
      nodes.push(svg('text', { class: `label ${style}`, x, y, 'text-anchor': anchor }, text));
    }
    return nodes;
  }

  // The ring is around the chosen step, or the one under the pointer in any chart.
  mark() {
    if (!this.toX) return;
    const points = run().regimes[state.draw]?.points ?? [];
    const step = nearestStep(points.map(p => p[0]), state.hover ?? state.step ?? Infinity);
    const found = points.find(p => p[0] === step);
    if (!found) return;
    this.ring.setAttribute('cx', this.toX(found[1]));
    this.ring.setAttribute('cy', this.toY(found[2]));
    setText(this.told, `step ${step}   ${found[3] ?? 'too early to name a regime'}   H(Z|X) ${number(found[1])}   I(X; Z) ${number(found[2])}`);
  }

  summary(paths) {
    return 'Regime map. ' + paths.map(({ run: one, points }) => {
      const last = points[points.length - 1];
      return `${one.name}: ${points.length} scored steps, at the last one (${last[0]}) ${last[3] ?? 'no regime named'}`;
    }).join('; ');
  }
}
