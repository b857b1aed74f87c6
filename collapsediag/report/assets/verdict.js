// The judgement in words, before any chart.

const MARKS = { critical: '\u25a0', warning: '\u25b2', info: '\u25cf', ok: '\u2713', skipped: '\u25cb' };

function showVerdict() {
  const one = run();
  const { verdict } = one;
  const lead = verdict.findings.find(finding => finding.check === verdict.lead);
  byId('verdict').replaceChildren(
    el('p', { class: 'kicker' }, kicker(one)),
    el('h1', { class: `status-${verdict.status}` }, verdict.title),
    lead ? el('p', { class: 'lead' }, `${lead.evidence} ${lead.meaning}`) : el('p', { class: 'lead' }, calmWords(one)),
    el('dl', { class: 'answers' }, ...answers(one, lead)),
    ...[live(one), failures(one)].filter(Boolean),
    checks(verdict),
  );
}

function kicker(one) {
  const { about, verdict } = one;
  const scored = `${plural(one.steps.length, 'step')}, ${verdict.n_scored} scored`;
  const when = about.created ? new Date(about.created * 1000).toISOString().slice(0, 10) : null;
  return [visibleString(one.name), about.model && visibleString(about.model), about.dtype && visibleString(about.dtype), scored, when].filter(Boolean).join(' \u00b7 ');
}

function calmWords(one) {
  const regime = one.verdict.regime ? `The regime at the last scored step (${one.verdict.last_scored_step}) is ${one.verdict.regime}.` : 'No regime could be named.';
  return `${regime} Training reward is no part of this judgement.`;
}

// What, since when, how sure, what to read.
function answers(one, lead) {
  const { verdict } = one;
  const rows = [];
  const row = (term, ...content) => rows.push(el('div', {}, el('dt', {}, term), el('dd', {}, ...content)));
  const rivals = verdict.findings.filter(finding => finding.is_lookalike && ['warning', 'critical'].includes(finding.status) && finding !== lead);
  if (rivals.length) row('Rule out first', rivals.map(finding => finding.title).join('; ') + '.');
  if (lead) {
    row('Since when', lead.since_step === null ? 'not tied to a step' : `step ${lead.since_step}${lead.n_clear ? '' : `; ${plural(lead.n_steps, 'measured step')} in a row show it`}`);
    row('How sure', sureWords(lead, verdict.settings.persistence));
    const also = verdict.findings.filter(finding => finding !== lead && !finding.is_lookalike && ['warning', 'critical'].includes(finding.status));
    if (also.length) row('Also', also.map(sinceWords).join('; ') + '.');
  }
  if (!lead) row('How sure', verdict.findings.find(finding => finding.check === 'template_collapse').evidence || 'No step was scored: nothing is known about the prompt.');
  const notes = verdict.findings.filter(finding => finding.status === 'info');
  if (notes.length) row('Worth knowing', notes.map(sinceWords).join('; ') + '.');
  row('Checked', verdict.counts);
  const reading = lead?.traces.length && verdict.traces_step !== null
    ? ['Traces ', ...lead.traces.flatMap((trace, i) => [i ? ', ' : '', traceLink(verdict.traces_step, trace)]), ' side by side. ']
    : [];
  if (lead && (reading.length || lead.next)) row('Read next', ...reading, lead.next);
  return rows;
}

// An abbreviation keeps its capitals.
const lowered = title => (/^[A-Z][a-z]/.test(title) ? title[0].toLowerCase() + title.slice(1) : title);
const sinceWords = finding => lowered(finding.title) + (finding.since_step === null ? '' : ` since step ${finding.since_step}`);

function sureWords(lead, persistence) {
  const named = lead.metric ? lead.metric.replace(/^collapse_\w+_sample\//, '').replaceAll('_', ' ') : null;
  const value = lead.value && named ? `${named} ${lead.value}${/\[/.test(lead.value) ? ' (95% interval)' : ', no interval known'}. ` : '';
  return `${value}A state is named after ${persistence} measured steps in a row.`;
}

function traceLink(step, trace) {
  return el('a', { href: `#step=${step}&trace=${trace}`, on: { click: event => {
    event.preventDefault();
    update({ trace, step: nearestStep(run().shownSteps, step) });
    byId('traces').scrollIntoView({ behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
  } } }, String(trace));
}

function live(one) {
  return one.live ? el('p', { class: `live ${one.live.state}`, role: 'status' }, one.live.words) : null;
}

function failures(one) {
  if (!one.failed.length) return null;
  const [step, reason] = one.failed[one.failed.length - 1];
  return el('p', { class: 'failures' }, `The diagnostics failed in ${plural(one.failed.length, 'step')} (crosses below the charts); last at step ${step}: ${visibleString(reason)}`);
}

function checks(verdict) {
  const rows = verdict.findings.map(finding => el('tr', { class: `status-${finding.status}` },
    el('td', {}, `${MARKS[finding.status]} ${finding.status}`),
    el('th', { scope: 'row' }, finding.check.replaceAll('_', ' ')),
    el('td', {}, finding.status === 'skipped' ? `Skipped: ${finding.missing}.` : `${finding.title}${finding.since_step === null ? '' : ` since step ${finding.since_step}`}. ${finding.evidence}`)));
  const summary = verdict.findings.filter(finding => !['ok', 'skipped'].includes(finding.status)).length;
  return el('details', { class: 'checks' }, el('summary', {}, `All ${verdict.findings.length} checks (${summary || 'none'} with something to say)`), el('div', { class: 'scroll' }, el('table', {}, el('tbody', {}, ...rows))));
}
