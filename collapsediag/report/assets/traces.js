// The trace reader: which traces there are, and one of them beside its own prompt and the prompt it was taken for.

// A token's shade is full at this many nats, at every step and in every run.
const FULL_SHADE = 2;
const SNIPPET = 110;

class TraceReader {
  constructor() {
    this.list = byId('trace-list');
    this.reader = byId('trace-reader');
    this.count = byId('trace-count');
    this.traces = [];
    this.filters();
    this.list.addEventListener('keydown', event => {
      if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
      event.preventDefault();
      event.stopPropagation();
      this.move(event.key === 'ArrowDown' ? 1 : -1);
      this.list.querySelector('[aria-selected=true]')?.focus();
    });
    on(['missed', 'environment', 'rewardFrom', 'rewardTo', 'search'], () => this.fillList());
    on(['trace'], () => this.choose());
  }

  filters() {
    const missed = byId('only-missed');
    missed.addEventListener('change', () => update({ missed: missed.checked }));
    on(['missed'], () => (missed.checked = state.missed));
    this.environment = byId('environment');
    this.environment.addEventListener('change', () => update({ environment: this.environment.value }));
    for (const [id, key] of [['reward-from', 'rewardFrom'], ['reward-to', 'rewardTo']]) {
      byId(id).addEventListener('input', event => update({ [key]: event.target.value === '' ? null : Number(event.target.value) }));
    }
    byId('search').addEventListener('input', event => update({ search: event.target.value }));
  }

  // scored: an unpacked scored step.
  show(scored) {
    this.scored = scored;
    this.matrix = scored.draws[state.draw];
    this.traces = scored.traces.filter(trace => trace.draw === state.draw);
    const environments = [...new Set(this.traces.map(trace => trace.environment).filter(name => name !== null))];
    if (state.environment && !environments.includes(state.environment)) state.environment = '';
    byId('environment-label').hidden = environments.length < 2;
    this.environment.replaceChildren(el('option', { value: '' }, 'every environment'), ...environments.map(name => el('option', { value: name, selected: name === state.environment }, visibleString(name))));
    byId('reward-label').hidden = !this.traces.some(trace => trace.reward !== null);
    this.list.hidden = byId('filters').hidden = !this.traces.length;
    this.findTrace();
    this.fillList();
    this.choose();
  }

  // Each step keeps other traces: stay with the prompt that is being read, and begin with a trace that was not retrieved.
  findTrace() {
    const isKept = this.traces.some(trace => trace.row === state.trace);
    const isAsked = state.trace !== null && this.prompt === undefined;
    if (!this.traces.length || isKept || isAsked) return;
    const near = this.traces.find(trace => trace.own === this.prompt);
    state.trace = (near ?? this.traces.find(isMissed) ?? this.traces[0]).row;
    keepAddress();
  }

  isShown(trace) {
    const { missed, environment, rewardFrom, rewardTo, search } = state;
    if (missed && !isMissed(trace)) return false;
    if (environment && trace.environment !== environment) return false;
    if (rewardFrom !== null && !(trace.reward !== null && trace.reward >= rewardFrom)) return false;
    if (rewardTo !== null && !(trace.reward !== null && trace.reward <= rewardTo)) return false;
    if (!search) return true;
    const wanted = search.toLowerCase();
    return [trace.trace, this.scored.contexts[trace.context], trace.group].some(text => text?.toLowerCase().includes(wanted));
  }

  fillList() {
    const shown = this.traces.filter(trace => this.isShown(trace));
    this.shown = shown;
    this.entries = new Map(shown.map(trace => [trace.row, this.entry(trace)]));
    this.list.replaceChildren(...this.entries.values());
    const missed = this.traces.filter(isMissed).length;
    setText(this.count, this.traces.length ? `${shown.length} of ${plural(this.traces.length, 'kept trace')}; ${missed} not retrieved` : '');
    this.mark();
  }

  entry(trace) {
    const text = (trace.trace ?? '').slice(0, SNIPPET);
    const kind = isMissed(trace) ? 'missed' : 'retrieved';
    const verdict = trace.tied ? `${trace.own} tied` : kind === 'missed' ? `${trace.own} \u2192 ${trace.best}` : `${trace.own}`;
    return el('button', { type: 'button', role: 'option', class: kind, tabindex: -1, 'aria-selected': 'false', on: { click: () => update({ trace: trace.row }) } },
      el('span', { class: 'row' }, String(trace.row)),
      el('span', { class: 'verdict', title: 'own prompt, and the one it was taken for' }, `${kind === 'missed' ? '\u2717' : '\u2713'} ${verdict}`),
      el('span', { class: 'reward' }, trace.reward === null ? '' : number(trace.reward)),
      el('bdi', { class: 'snippet' }, visibleString(text.replace(/\s+/g, ' '))));
  }

  move(by) {
    if (!this.shown.length) return;
    const index = this.shown.findIndex(trace => trace.row === state.trace);
    update({ trace: this.shown[clamp(index + by, 0, this.shown.length - 1)].row });
  }

  mark() {
    this.list.querySelector('[aria-selected=true]')?.setAttribute('aria-selected', 'false');
    const entry = this.entries?.get(state.trace);
    if (!entry) return;
    entry.setAttribute('aria-selected', 'true');
    entry.tabIndex = 0;
    const { offsetTop: top, offsetHeight: height } = entry;
    if (top < this.list.scrollTop || top + height > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top - 60;
  }

  choose() {
    this.mark();
    const trace = this.traces.find(one => one.row === state.trace);
    if (trace) this.prompt = trace.own;
    this.reader.replaceChildren(...(trace ? this.read(trace) : [this.notKept()]));
    if (trace && this.strip) drawStrip(this.strip, this.matrix, trace);
  }

  notKept() {
    if (!this.traces.length) return el('p', { class: 'why' }, 'Not shown, because no traces of this step were kept.');
    return el('p', { class: 'why' }, state.trace === null
      ? 'Choose a trace.'
      : `The text of trace ${state.trace} was not kept: ${plural(this.traces.length, 'trace')} of this step were, drawn without looking at their scores.`);
  }

  read(trace) {
    const facts = [
      trace.reward === null ? null : `reward ${number(trace.reward)}`,
      trace.length === null ? null : plural(trace.length, 'token'),
      trace.environment === null ? null : visibleString(trace.environment),
      `group ${visibleString(trace.group)}`,
    ].filter(Boolean);
    this.strip = this.matrix?.levels && this.matrix.rowIndex.has(trace.row) ? el('canvas', { class: 'strip', role: 'img', 'aria-label': stripWords(trace) }) : null;
    return [
      el('h4', {}, `Trace ${trace.row}: `, el('span', { class: isMissed(trace) ? 'bad' : 'good' }, verdictWords(trace))),
      el('p', { class: 'facts' }, facts.join(' \u00b7 ')),
      this.strip ? el('div', { class: 'strip-holder' }, this.strip, el('p', { class: 'note' }, stripWords(trace))) : null,
      this.prompts(trace),
      el('h5', {}, 'Its reasoning'),
      this.reasoning(trace),
      this.siblings(trace),
    ].filter(Boolean);
  }

  // Both prompts, what they share at the beginning and the end pale: the difference is what the trace should say.
  prompts(trace) {
    const own = trace.context === null ? null : this.scored.contexts[trace.context];
    const other = trace.context_best === null ? null : this.scored.contexts[trace.context_best];
    if (own === null) return el('p', { class: 'why' }, 'Prompts are not shown, because their text was not kept (the monitor had no tokenizer).');
    const [head, tail] = other === null ? [0, 0] : shared(own, other);
    const box = (title, text) => el('div', {}, el('h5', {}, title), el('pre', { dir: 'auto', tabindex: 0 }, ...faded(text, head, tail)));
    const boxes = [box(`Its own prompt (${trace.own})`, own)];
    if (other !== null) boxes.push(box(`The prompt it was taken for (${trace.best})`, other));
    return el('div', { class: 'prompts' }, ...boxes);
  }

  reasoning(trace) {
    if (trace.trace === null) return el('p', { class: 'why' }, 'Not shown, because its text was not kept (the monitor had no tokenizer).');
    if (!trace.tokens) {
      return el('div', {},
        el('pre', { class: 'reasoning', dir: 'auto', tabindex: 0 }, visible(trace.trace)),
        el('p', { class: 'note' }, `Tokens are not shaded, because ${visibleString(trace.pmi_reason)}.`));
    }
    const tokens = trace.tokens.map((token, i) => this.token(token, trace.pmi[i]));
    const left = trace.length > tokens.length ? ` The first ${tokens.length} of ${trace.length} tokens.` : '';
    return el('div', {},
      el('pre', { class: 'reasoning', dir: 'auto', tabindex: 0 }, ...tokens),
      el('p', { class: 'note shades' }, 'Shade: how much more likely (', el('span', { class: 'above s4' }, 'blue'), ') or less likely (', el('span', { class: 'below s4' }, 'orange'),
        `) its own prompt makes a token than the mixture of all prompts; full at ${FULL_SHADE} nats.${left}`));
  }

  token(text, pmi) {
    if (pmi === null || pmi === undefined) return el('span', { title: 'not scored' }, visible(text));
    const shade = Math.min(8, Math.round((Math.abs(pmi) / FULL_SHADE) * 8));
    return el('span', { class: shade ? `${pmi > 0 ? 'above' : 'below'} s${shade}` : null, title: `${signed(pmi)} nats` }, visible(text));
  }

  siblings(trace) {
    const others = this.traces.filter(one => one.own === trace.own && one !== trace);
    if (!others.length) return el('p', { class: 'note' }, 'No other trace of this prompt was kept.');
    const buttons = others.map(one => el('button', { type: 'button', class: isMissed(one) ? 'missed' : 'retrieved', on: { click: () => update({ trace: one.row }) } },
      `${isMissed(one) ? '\u2717' : '\u2713'} ${one.row}${one.reward === null ? '' : `, reward ${number(one.reward)}`}`));
    return el('div', { class: 'siblings' }, el('h5', {}, 'Other traces of the same prompt'), ...buttons);
  }
}

// A tie with another prompt is no retrieval.
const isMissed = trace => trace.own !== trace.best || trace.tied > 0;

function verdictWords(trace) {
  if (trace.tied) return `not told apart from ${plural(trace.tied, 'other prompt')}`;
  const own = trace.own_pmi === null ? '' : ` (${signed(trace.own_pmi)} nats)`;
  if (trace.own === trace.best) return `retrieved as its own prompt${own}`;
  const best = trace.best_pmi === null ? '' : ` (${signed(trace.best_pmi)} against ${signed(trace.own_pmi)} nats)`;
  return `not retrieved, prompt ${trace.best} makes it likelier than its own${best}`;
}

const stripWords = trace => `Its score under every prompt, from \u2212log P to +log P nats: its own (${trace.own}) dark${trace.own === trace.best ? '' : `, the likeliest (${trace.best}) orange`}.`;

// One bar for each prompt, up where the prompt makes the trace likelier than the mixture does.
function drawStrip(canvas, matrix, trace) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const [width, height] = [canvas.clientWidth || 400, 64];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const index = matrix.rowIndex.get(trace.row);
  const bar = width / matrix.n_columns;
  const gap = bar > 4 ? 1 : 0;
  for (let column = 0; column < matrix.n_columns; column++) {
    const value = cell(matrix, index, column);
    if (value === null) continue;
    const size = (value / matrix.range) * (height / 2 - 1);
    const colour = column === trace.own ? '--main' : column === trace.best ? '--second' : '--pale';
    context.fillStyle = style.getPropertyValue(colour);
    context.fillRect(column * bar, height / 2 - Math.max(0, size), Math.max(1, bar - gap), Math.max(1, Math.abs(size)));
  }
  context.fillStyle = style.getPropertyValue('--soft');
  context.fillRect(0, height / 2, width, 0.5);
}

// How many characters two texts share at the beginning and, beyond that, at the end; words are not cut.
function shared(a, b) {
  const limit = Math.min(a.length, b.length);
  let head = 0;
  while (head < limit && a[head] === b[head]) head++;
  let tail = 0;
  while (head && /\w/.test(a[head - 1])) head--;
  while (tail < limit - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  while (tail && /\w/.test(a[a.length - tail])) tail--;
  return [head, tail];
}

function faded(text, head, tail) {
  const part = (from, to, isPale) => (from < to ? el('span', { class: isPale ? 'pale' : null }, visible(text.slice(from, to))) : null);
  return [part(0, head, true), part(head, text.length - tail, false), part(text.length - tail, text.length, true)].filter(Boolean);
}
