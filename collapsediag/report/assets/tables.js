// Numbers as numbers: of the scored steps, of every metric, of several runs; and the charts of each environment.

const TABLE_NAMES = [
  '{draw}retrieval_accuracy', '{draw}retrieval_chance_level', '{draw}mi_seq_estimate', '{draw}mi_upper_bound', '{draw}conditional_entropy_est',
  '{draw}reasoning_entropy_est', '{draw}mi_zscore_ema', 'reward/mean', 'reward/within_group_std', 'reward/all_equal_fraction',
  'format/valid_fraction', 'length/mean', 'entropy/token_mean', 'diversity/distinct_answers_per_group', 'tools/calls_per_rollout',
];
const ENVIRONMENT_MEASURES = [
  'reward/mean', 'reward/within_group_std', 'reward/all_equal_fraction', 'pass@1', 'format/valid_fraction', 'length/mean',
  'diversity/distinct_answers_per_group', 'tools/calls_per_rollout', 'entropy/token_mean',
];
const INTERVAL = /\/ci_(low|high)$/;
const MAX_TABLE_ROWS = 400;

const titleOf = (one, name) => one.info[name]?.title ?? name;

// The table for those who cannot see charts, filled when it is opened.
function stepTable() {
  const one = run();
  const names = TABLE_NAMES.map(withDraw).filter(name => one.columns[name]);
  const scored = one.scored_steps.length ? one.scored_steps : one.steps;
  const steps = scored.slice(-MAX_TABLE_ROWS);
  const head = el('tr', {}, el('th', { scope: 'col' }, 'step'), ...names.map(name => el('th', { scope: 'col' }, titleOf(one, name))));
  const rows = steps.map(step => el('tr', {}, el('th', { scope: 'row' }, String(step)), ...names.map(name => el('td', {}, number(valueAt(one, name, step))))));
  const caption = el('caption', {}, `${visibleString(one.name)}: ${scored.length > steps.length ? `the last ${steps.length} of ${scored.length}` : `all ${steps.length}`} ${one.scored_steps.length ? 'scored ' : ''}steps`);
  return el('table', {}, caption, el('thead', {}, head), el('tbody', {}, ...rows));
}

// Every number of the run, with a line of its course.
function numberTable() {
  const one = run();
  const names = Object.keys(one.columns).filter(name => !INTERVAL.test(name)).sort();
  const rows = names.map(name => {
    const { x, y } = curve(one, name);
    const info = one.info[name];
    const picture = el('canvas', { class: 'spark', width: 240, height: 44, 'aria-hidden': 'true' });
    const drawn = el('tr', {},
      el('th', { scope: 'row', title: info?.description }, visibleString(name)),
      el('td', {}, picture),
      ...[y[0], y[y.length - 1], ...extent(y)].map(value => el('td', { class: 'value' }, number(value))),
      el('td', {}, info?.unit ?? ''),
      el('td', {}, { up: 'rising', down: 'falling', none: '' }[info?.bad] ?? ''));
    spark(picture, x, y);
    return drawn;
  });
  const head = ['number', 'course', 'first', 'last', 'lowest', 'highest', 'unit', 'bad is'].map(text => el('th', { scope: 'col' }, text));
  return el('table', { class: 'numbers' }, el('thead', {}, el('tr', {}, ...head)), el('tbody', {}, ...rows, ...notMeasured(one)));
}

function notMeasured(one) {
  return Object.entries(one.not_measured).flatMap(([name, reasons]) => reasons.map(([reason, first, last, n]) => el('tr', { class: 'unmeasured' },
    el('th', { scope: 'row' }, visibleString(name)),
    el('td', { colspan: 7 }, `not measured in ${plural(n, 'step')} (${first} to ${last}), because ${visibleString(reason)}`))));
}

function spark(canvas, x, y) {
  if (!x.length) return;
  const context = canvas.getContext('2d');
  const [low, high] = extent(y);
  const [first, last] = [x[0], x[x.length - 1]];
  const toX = value => 3 + ((value - first) / (last - first || 1)) * 234;
  const toY = value => 40 - ((value - low) / (high - low || 1)) * 36;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue('--main');
  context.lineWidth = 2;
  context.stroke(new Path2D(linePath(x, y, toX, toY)));
}

// A details element whose content is made when it is opened and again whenever what it shows changes.
function lazy(id, make, keys) {
  const details = byId(id);
  const holder = details.querySelector('.scroll');
  const fill = () => (details.open ? holder.replaceChildren(make()) : holder.replaceChildren());
  details.addEventListener('toggle', fill);
  on(keys, fill);
}

// Small multiples: one measure, one axis, a chart for each environment.
function environmentCharts() {
  const section = byId('environments-section');
  const names = [...new Set(page.runs.flatMap(one => one.environments))];
  section.hidden = !names.length;
  if (!names.length) return;
  const measures = ENVIRONMENT_MEASURES.filter(measure => page.runs.some(one => names.some(name => one.columns[`env/${name}/${measure}`])));
  state.measure = measures.includes(state.measure) ? state.measure : measures[0] ?? null;
  const chooser = byId('measure');
  chooser.replaceChildren(...measures.map(measure => el('option', { value: measure, selected: measure === state.measure }, measureTitle(measure))));
  chooser.onchange = () => update({ measure: chooser.value });
  charts.filter(chart => chart.options.isMultiple).forEach(chart => charts.splice(charts.indexOf(chart), 1));
  const made = names.map(name => environmentChart(name, names));
  byId('environments').replaceChildren(...made.map(chart => chart.figure));
  drawCharts(made);
}

const measureTitle = measure => page.runs.map(one => Object.entries(one.info).find(([name]) => name.endsWith('/' + measure))?.[1].title).find(Boolean) ?? measure;

function environmentChart(name, names) {
  const full = one => `env/${one}/${state.measure}`;
  const definition = {
    key: `environment-${name}`, title: visibleString(decodeURIComponentSafely(name)), note: '', unit: 'ratio', reach: [0], gap: null, n_overlaid: 1, is_wide: false,
    lines: [{ name: full(name), label: '', style: 'main', low: `${full(name)}/ci_low`, high: `${full(name)}/ci_high` }],
  };
  const all = [0, -Infinity];
  for (const one of page.runs) names.forEach(other => extent(curve(one, full(other)).y, all));
  return new Chart(definition, { height: 118, isMultiple: true, range: all[1] > all[0] ? [all[0], all[1] * 1.05] : [0, 1] });
}

function decodeURIComponentSafely(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// Several runs: what each one is, which are drawn, and what goes with success.
function runsTable() {
  const section = byId('runs-section');
  section.hidden = byId('comparison-section').hidden = !isComparing();
  if (!isComparing()) return;
  const fill = () => byId('runs').replaceChildren(el('table', {},
    el('thead', {}, el('tr', {}, ...['', 'run', 'verdict', 'regime', 'steps', 'drawn'].map(text => el('th', { scope: 'col' }, text)))),
    el('tbody', {}, ...page.runs.map(runRow))));
  on(['run', 'hidden'], fill);
  fill();
  const comparison = page.comparison;
  byId('comparison').replaceChildren(...(comparison ? spearmanTable(comparison) : [el('p', { class: 'why' }, 'No table of correlations: fewer than two of these runs hold one and the same outcome.')]));
}

function runRow(one) {
  const isShown = !state.hidden.has(one.index);
  const box = el('input', { type: 'checkbox', checked: isShown, 'aria-label': `draw run ${one.letter}`, on: { change: () => {
    const hidden = new Set(state.hidden);
    if (hidden.has(one.index)) hidden.delete(one.index);
    else hidden.add(one.index);
    update({ hidden });
  } } });
  const name = el('button', { type: 'button', class: 'link', 'aria-pressed': String(one.index === state.run), on: { click: () => chooseRun(one.index) } }, visibleString(one.name));
  return el('tr', {},
    el('td', {}, el('span', { class: `letter run-${one.index % 8}` }, one.letter)),
    el('th', { scope: 'row' }, name),
    el('td', { class: `status-${one.verdict.status}` }, `${MARKS[one.verdict.status]} ${one.verdict.title}`),
    el('td', {}, one.verdict.regime ?? 'none named'),
    el('td', { class: 'value' }, number(one.steps.length)),
    el('td', {}, box));
}

function spearmanTable(comparison) {
  const rows = comparison.correlations.slice(0, 20).map(row => el('tr', { class: row.low > 0 || row.high < 0 ? null : 'pale' },
    el('th', { scope: 'row' }, visibleString(row.metric)),
    el('td', {}, row.summary),
    ...[signed(row.rho), `[${signed(row.low)}, ${signed(row.high)}]`, String(row.n)].map(text => el('td', { class: 'value' }, text))));
  const head = ['diagnostic', 'of each run', 'rho', '95% interval', 'runs'].map(text => el('th', { scope: 'col' }, text));
  const nothing = el('p', { class: 'why' }, 'Not computed, because a rank correlation needs three runs that hold the number.');
  return [
    el('h3', {}, `What goes with ${comparison.outcome} across runs: `, el('em', {}, 'a pale row says nothing')),
    comparison.warning ? el('p', { class: 'note' }, comparison.warning) : null,
    rows.length ? el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {}, ...head)), el('tbody', {}, ...rows))) : nothing,
  ].filter(Boolean);
}

function chooseRun(index) {
  const chosen = page.runs[index];
  const draw = chosen.draws[state.draw] ? state.draw : Object.keys(chosen.draws)[0];
  const { shownSteps: steps } = chosen;
  update({ run: index, draw, trace: null, step: nearestStep(steps, state.step ?? steps[steps.length - 1]) });
}
