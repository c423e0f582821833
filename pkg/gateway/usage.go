package gateway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Metering says how the gateway counts what requests to model providers use, and what limits it.
type Metering struct {
	Store   string       `json:"store"`          // path of the database
	Session string       `json:"session"`        // id
	RepoKey string       `json:"repo_key"`       //
	Task    string       `json:"task,omitempty"` // id
	Tree    string       `json:"tree"`           // as in store.Usage
	Budget  Budget       `json:"budget,omitzero"`
	Shared  []Shared     `json:"shared,omitempty"`
	Prices  meter.Prices `json:"prices"`
}

// Shared is the budget of a task or session above this one, for all of its subtasks together.
type Shared struct {
	Tree   string `json:"tree"`
	Budget Budget `json:"budget"`
}

// limited reports whether anything limits the use of models.
func (m Metering) limited() bool { return m.Budget != (Budget{}) || len(m.Shared) > 0 }

// Budget limits the use of models. Zero values do not restrict.
type Budget struct {
	Session int64 `json:"session,omitempty"` // billionths of a US dollar, of the session and its subtasks
	Day     int64 `json:"day,omitempty"`     // the same, of all sessions since midnight
	Tokens  int64 `json:"tokens,omitempty"`  // of the session and its subtasks
}

// The names of the limits.
const (
	LimitSession = "session"
	LimitDay     = "day"
	LimitTokens  = "tokens"
	LimitShared  = "shared" // of a task or session above this one
)

// BudgetEvent is the kind of the event that tells how much of a budget is used. Its data is a
// BudgetNote.
const BudgetEvent = "budget"

// BudgetNote tells that a part of a budget is used.
type BudgetNote struct {
	Limit   string         `json:"limit"`   // one of the limits above
	Percent int64          `json:"percent"` // 80 or 100
	Used    store.UsageSum `json:"used"`
	Budget  Budget         `json:"budget"`
	Seq     uint64         `json:"seq"` // of the gateway's notes
}

// budgetPercent are the percentages of a budget that are noted.
var budgetPercent = []int64{80, 100}

const (
	// Bytes of a request's body that are read before it is passed on. A longer one is assumed to
	// be as expensive as possible until its answer tells.
	maxParsed  = 1 << 20
	maxDecoded = 8 << 20
	// How long a request waits for others to be settled, and how often it looks.
	maxUnsettled = 10 * time.Minute
	pendingPoll  = 250 * time.Millisecond
	// Output tokens in a second of an answer that ends before it reports its usage. No model is
	// as fast.
	maxSpeed = 1000
	// Models without a price that a guest can cause warnings about.
	maxUnpriced = 10
)

// metering counts requests. Its methods may be called concurrently.
type metering struct {
	Metering
	ledger func() (*store.Store, error)

	mu       sync.Mutex
	unpriced map[string]bool // models that there was a warning about
	err      error           // the last failure to count
	last     *BudgetNote
	used     *BudgetNote // the last limit of the session for which a request was refused
}

// SetMetering makes the gateway count the use of models in the requests that it reads, and with
// a budget it reads all requests to the providers. It replaces an earlier setting.
func (g *Gateway) SetMetering(m Metering) error {
	m.Tree = cmp.Or(m.Tree, cmp.Or(m.Task, m.Session)+"/") // written by an earlier version
	now := &metering{Metering: m, unpriced: map[string]bool{}}
	if was := g.metering.Load(); was != nil && was.Store == m.Store && was.Session == m.Session {
		now.ledger, now.last = was.ledger, g.lastNote()
		if was.Budget == m.Budget {
			now.used = g.exhausted()
		}
	} else {
		// A gateway that counts nothing needs no memory for the database.
		now.ledger = onceOpen(func() (*store.Store, error) {
			s, err := store.Open(g.ctx, m.Store)
			if err != nil {
				return nil, err
			}
			if err := s.AbandonUsage(g.ctx, m.Session); err != nil { // an earlier gateway's
				return nil, errors.Join(err, s.Close())
			}
			g.run(s, func() { <-g.ctx.Done() })
			return s, nil
		})
	}
	g.metering.Store(now)
	return g.readRuledHosts()
}

// reopenAfter is how long an error of the store is returned before it is opened again.
const reopenAfter = 5 * time.Second

// onceOpen returns a function that calls open until it succeeds, and then always returns that store.
func onceOpen(open func() (*store.Store, error)) func() (*store.Store, error) {
	var mu sync.Mutex
	var s *store.Store
	var err error
	var failed time.Time
	return func() (*store.Store, error) {
		mu.Lock()
		defer mu.Unlock()
		if s == nil && time.Since(failed) >= reopenAfter {
			if s, err = open(); err != nil {
				s, failed = nil, time.Now()
			}
		}
		return s, err
	}
}

// readHosts returns the hosts to which all requests are read, sorted.
func (g *Gateway) readHosts() []string {
	all := g.policy.requestHosts()
	if m := g.metering.Load(); m != nil && m.limited() {
		all = slices.Compact(slices.Sorted(slices.Values(slices.Concat(all, meter.Hosts()))))
	}
	return all
}

// usageError returns the last failure to count, or nil.
func (g *Gateway) usageError() error {
	m := g.metering.Load()
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

func (m *metering) failed(err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
	return err
}

// limits returns the limits of a request at that time.
func (m *metering) limits(at time.Time) (all []store.UsageLimit) {
	add := func(l store.UsageLimit) {
		if l.Cost > 0 || l.Tokens > 0 {
			all = append(all, l)
		}
	}
	add(store.UsageLimit{Name: LimitSession, Tree: m.Tree, Cost: m.Budget.Session})
	add(store.UsageLimit{Name: LimitTokens, Tree: m.Tree, Tokens: m.Budget.Tokens})
	for _, s := range m.Shared {
		add(store.UsageLimit{Name: LimitShared, Tree: s.Tree, Cost: s.Budget.Session})
		add(store.UsageLimit{Name: LimitShared, Tree: s.Tree, Tokens: s.Budget.Tokens})
	}
	if m.Budget.Day > 0 {
		y, month, d := at.Date()
		all = append(all, store.UsageLimit{Name: LimitDay, Since: time.Date(y, month, d, 0, 0, 0, 0, at.Location()), Cost: m.Budget.Day})
	}
	return all
}

// use is one request that is counted.
type use struct {
	m      *metering
	of     meter.Provider
	id     string
	bound  meter.Usage
	noEnd  bool // the provider goes on when the answer is cut
	began  time.Time
	answer *meter.Reader
	mask   bool // the answer's report of the usage is not for the client
	once   sync.Once
}

type useKey struct{}

func useOf(r *http.Request) *use {
	u, _ := r.Context().Value(useKey{}).(*use)
	return u
}

// refusal is an error that the client of a provider understands.
type refusal struct {
	provider meter.Provider
	status   int
	kind     string
	text     string
}

func (e *refusal) Error() string { return e.text }

// write answers with the error, in the form of the provider. The header tells the providers'
// libraries not to try again.
func (e *refusal) write(rw http.ResponseWriter) {
	detail := map[string]any{"type": e.kind, "message": "agent-sessionizer: " + clean(e.text)}
	answer := map[string]any{"error": detail}
	if e.provider == meter.Anthropic {
		answer["type"] = "error"
	} else {
		detail["code"], detail["param"] = e.kind, nil
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.Header().Set("X-Should-Retry", "false")
	rw.WriteHeader(e.status)
	_ = json.NewEncoder(rw).Encode(answer) // the client may be gone
}

// meter reserves what r may use. It returns nil if r costs nothing, and a refusal if r must not
// be sent. The body of r can be replaced.
func (c *conn) meter(r *http.Request) (*use, error) {
	m := c.g.metering.Load()
	if m == nil {
		return nil, nil
	}
	provider, kind := meter.Of(c.name, r.Method, r.URL.EscapedPath())
	switch {
	case provider == "":
		return nil, nil
	case isWebSocket(r):
		// Codex falls back to HTTP on this status.
		return nil, &refusal{provider, http.StatusUpgradeRequired, "invalid_request_error", "usage is counted over HTTP, not over WebSockets"}
	case kind == meter.Uncounted && m.limited():
		return nil, &refusal{provider, http.StatusForbidden, "permission_error", "this session has a budget, and what " + r.URL.Path + " uses cannot be counted"}
	case kind != meter.Counted:
		return nil, nil
	}
	request, n, err := parseRequest(r)
	if err != nil {
		return nil, &refusal{provider, http.StatusBadRequest, "invalid_request_error", "the request cannot be read: " + err.Error()}
	}
	u := &use{m: m, of: provider, id: ids.Hex(16), bound: m.Prices.Bound(request, n), noEnd: request.Background, mask: request.Silent, began: time.Now()}
	u.bound.Regional = true
	if err := m.reserve(r.Context(), u); err != nil {
		if over, ok := errors.AsType[*store.OverLimitError](err); ok {
			return nil, m.over(provider, over)
		}
		if r.Context().Err() != nil {
			panic(http.ErrAbortHandler) // the guest is gone
		}
		if m.limited() {
			return nil, &refusal{provider, http.StatusServiceUnavailable, "api_error", "the use of models cannot be counted: " + err.Error()}
		}
		return nil, nil //nolint:nilerr // the error is reported in the status; without a budget, nothing depends on it
	}
	return u, nil
}

// parseRequest reads what bounds the cost of r. n is the number of bytes of its body, or -1.
func parseRequest(r *http.Request) (request meter.Request, n int64, err error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxParsed+1))
	if err != nil {
		return request, 0, err
	}
	whole := len(body) <= maxParsed
	encoding := r.Header.Get("Content-Encoding")
	if encoding != "" {
		decoding.Lock()
		defer decoding.Unlock()
	}
	plain, known := decoded(body, encoding)
	request, insert := meter.ParseRequest(r.URL.EscapedPath(), plain, whole && known)
	if len(plain) != len(body) {
		insert = "" // the body stays as it is
		n = int64(len(plain))
	}
	if insert != "" {
		brace := bytes.IndexByte(body, '{') + 1
		body = slices.Concat(body[:brace], []byte(insert+","), body[brace:])
	}
	if whole {
		setBody(r, body)
		return request, max(n, int64(len(body))), nil
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
	return request, r.ContentLength, nil
}

// decoding is held while a decoded body is in memory, which may be much larger than the body.
var decoding sync.Mutex

// decoded returns a body without its encoding, if that is known and the body is not too long.
// Codex compresses what it sends to chatgpt.com.
func decoded(body []byte, encoding string) (plain []byte, known bool) {
	switch encoding {
	case "":
		return body, true
	case "zstd":
		r, err := zstd.NewReader(bytes.NewReader(body), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20), zstd.WithDecoderLowmem(true))
		if err != nil {
			return body, false
		}
		defer r.Close()
		plain, err := io.ReadAll(io.LimitReader(r, maxDecoded+1))
		if err != nil || len(plain) > maxDecoded {
			return body, false
		}
		return plain, true
	}
	return body, false
}

// reserve adds a use to the ledger. If the budget is reached only with the bounds of requests that
// are under way, it waits for them.
func (m *metering) reserve(ctx context.Context, u *use) error {
	ledger, err := m.ledger()
	if err != nil {
		return m.failed(err)
	}
	for end := u.began.Add(maxUnsettled); ; {
		err := ledger.ReserveUsage(ctx, m.row(u, u.bound), m.limits(time.Now()))
		over, ok := errors.AsType[*store.OverLimitError](err)
		switch {
		case err == nil:
			_ = m.failed(nil)
			return nil
		case !ok:
			return m.failed(err)
		case !over.Pending || time.Now().After(end):
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pendingPoll):
		}
	}
}

func (m *metering) row(u *use, used meter.Usage) store.Usage {
	t := used.Tokens
	return store.Usage{
		Session: m.Session, Request: u.id, At: u.began, RepoKey: m.RepoKey, Task: m.Task, Tree: m.Tree, Model: clean(used.Model),
		Input: t.Input, CacheRead: t.CacheRead, CacheWrite: t.CacheWrite, CacheWrite1h: t.CacheWrite1, Output: t.Output,
		Cost: m.Prices.Cost(used),
	}
}

// over returns the refusal when a budget is used up.
func (m *metering) over(provider meter.Provider, e *store.OverLimitError) error {
	// With the types with which the providers themselves report that no money is left.
	r := &refusal{provider, http.StatusPaymentRequired, "billing_error", ""}
	if provider == meter.OpenAI {
		// OpenAI's own status is 429. Codex would replace the text then, and try again after 402.
		r.status, r.kind = http.StatusBadRequest, "insufficient_quota"
	}
	if e.Limit.Name == LimitSession || e.Limit.Name == LimitTokens { // the others are not this session's
		m.mu.Lock()
		m.used = &BudgetNote{Limit: e.Limit.Name, Percent: 100, Used: e.Used, Budget: m.Budget}
		m.mu.Unlock()
	}
	switch e.Limit.Name {
	case LimitShared:
		r.text = "the budget that this subtask shares with the session or task above it is used up"
	case LimitTokens:
		r.text = fmt.Sprintf("the session's budget of %d tokens is used up (%d); on the host: agent-sessionizer budget SESSION --tokens N", e.Limit.Tokens, e.Used.Tokens)
	case LimitDay:
		r.text = fmt.Sprintf("today's budget of %s for all sessions is used up (%s); on the host: agent-sessionizer config edit config.yaml", measure.USD(e.Limit.Cost), measure.USD(e.Used.Cost))
	default:
		r.text = fmt.Sprintf("the session's budget of %s is used up (%s); on the host: agent-sessionizer budget SESSION --money 'N USD'", measure.USD(e.Limit.Cost), measure.USD(e.Used.Cost))
	}
	return r
}

// settle replaces the bound by what was used.
func (u *use) settle(used meter.Usage) {
	u.once.Do(func() {
		m := u.m
		used.Model = cmp.Or(used.Model, u.bound.Model)
		ledger, err := m.ledger()
		if err == nil {
			// The count must not depend on whether the client still waits.
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			err = ledger.SettleUsage(ctx, m.row(u, used), m.limits(time.Now()), budgetPercent, func(l store.UsageLimit, sum store.UsageSum, percent int64) store.Event {
				return store.NewEvent(BudgetEvent, m.note(BudgetNote{Limit: l.Name, Percent: percent, Used: sum, Budget: m.Budget}))
			})
			m.warn(ctx, ledger, used)
		}
		_ = m.failed(err)
	})
}

// note numbers a note, and keeps it for the gateway's status.
func (m *metering) note(n BudgetNote) BudgetNote {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.Seq = 1; m.last != nil {
		n.Seq = m.last.Seq + 1
	}
	m.last = &n
	return n
}

// lastNote returns the last note about the budget, or nil.
func (g *Gateway) lastNote() *BudgetNote {
	m := g.metering.Load()
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// exhausted returns the limit of the session for which a request was refused last, or nil. A
// new limit forgets it.
func (g *Gateway) exhausted() *BudgetNote {
	m := g.metering.Load()
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// warn adds a warning about a model without a price.
func (m *metering) warn(ctx context.Context, ledger *store.Store, used meter.Usage) {
	m.mu.Lock()
	first := used.Tokens.Total() > 0 && !m.unpriced[used.Model] && !m.Prices.Known(used.Model) && len(m.unpriced) < maxUnpriced
	if first {
		m.unpriced[used.Model] = true
	}
	m.mu.Unlock()
	if first {
		_ = ledger.Append(ctx, m.Session, store.NewEvent("warning", map[string]string{ // the use itself is counted
			"message": fmt.Sprintf("the model %.80q has no price, and counts as the most expensive one", clean(used.Model)),
			"hint":    "agent-sessionizer config edit prices.yaml",
		}))
	}
}

// cut returns what a request used at most whose answer has ended before it reported that.
func (u *use) cut(read meter.Usage) meter.Usage {
	read.Fast, read.Regional = read.Fast || u.bound.Fast, true
	output := max(read.Tokens.Output, int64(time.Since(u.began).Seconds()*maxSpeed))
	if u.noEnd {
		output = u.bound.Tokens.Output
	}
	if read.Tokens.Output = 0; read.Tokens.Total() == 0 {
		read.Tokens = u.bound.Tokens
	}
	read.Tokens.Output = min(output, u.bound.Tokens.Output)
	return read
}

// unsent settles a request that was not sent.
func (u *use) unsent() { u.settle(meter.Usage{}) }

// lost settles a request without an answer.
func (u *use) lost() { u.settle(u.cut(meter.Usage{})) }

// read makes the use follow a response.
func (u *use) read(r *http.Response) {
	if r.StatusCode >= 300 { // the providers do not charge for errors
		u.settle(meter.Usage{})
		return
	}
	u.answer = meter.NewReader(u.of, r.Header.Get("Content-Type"))
	body := &countedBody{ReadCloser: r.Body, u: u}
	if r.Body = body; u.mask && strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		r.Body = struct {
			io.Reader
			io.Closer
		}{meter.WithoutUsage(body), body}
	}
}

// countedBody is the body of an answer that is read for its usage.
type countedBody struct {
	io.ReadCloser
	u *use
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	_, _ = b.u.answer.Write(p[:n]) // never fails
	if err != nil {
		b.end(errors.Is(err, io.EOF))
	}
	return n, err
}

func (b *countedBody) Close() error {
	b.end(false)
	return b.ReadCloser.Close()
}

// end settles the use before the client sees the end of the answer.
func (b *countedBody) end(whole bool) {
	used := b.u.answer.Usage(whole)
	if !used.Complete {
		used = b.u.cut(used)
	}
	used.Fast = used.Fast || b.u.bound.Fast
	b.u.settle(used)
}
