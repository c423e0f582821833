package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// seal is the subject at which hosts ask a host for secrets; its name and that of the host that asks
// follow. The servers let a host use only its own name. No stream keeps these messages.
const seal = "seal."

const (
	maxAnswering = 64               // requests that a host answers at the same time
	maxAsking    = 8                // of these, of the same host
	maxQuestion  = 4 << 10          // bytes of a request
	answerTime   = 50 * time.Second // for an answer, including the resolution of the secrets; shorter than the permission to answer
	askTime      = answerTime + 5*time.Second
)

// SecretsRequest asks the host on which a task was submitted for those of the task's secrets that only
// that host can resolve.
type SecretsRequest struct {
	Host     string `json:"host"` // that asks: it runs the task
	Task     string `json:"task"`
	Fence    uint64 `json:"fence"`    // of its claim
	Manifest string `json:"manifest"` // identifies the manifest that it runs
}

// sealedReply has sealed secrets, or why there are none.
type sealedReply struct {
	Sealed []byte `json:"sealed,omitempty"`
	Code   string `json:"code,omitempty"`
	Error  string `json:"error,omitempty"`
	Hint   string `json:"hint,omitempty"`
}

// Exchange sends secrets of tasks between two hosts, encrypted to the key of the host that asks for
// them. What it sends is stored nowhere: a host that needs it again asks again.
type Exchange struct {
	Conn      *nats.Conn
	Host      string // this one
	Keys      *Keys
	Authority []byte // PEM
	Members   *Members
}

// Ask asks a host for secrets.
func (x *Exchange) Ask(ctx context.Context, host string, r SecretsRequest) ([]byte, error) {
	if err := CheckName(host); err != nil {
		return nil, err
	}
	r.Host = x.Host
	text, err := x.Keys.sign(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	m, err := x.Conn.RequestWithContext(ctx, seal+host+"."+x.Host, text)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return nil, fail.New(fail.Host, "it is not connected to the cluster")
	case err != nil:
		return nil, fail.New(fail.Host, "it does not answer: %w", err)
	}
	var a sealedReply
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return nil, fail.New(fail.Failure, "its answer is invalid: %w", err)
	}
	if a.Error != "" {
		return nil, fail.New(fail.ParseCode(a.Code), "%s", termtext.Line(a.Error)).WithHint("%s", termtext.Line(a.Hint))
	}
	return x.Keys.Open(a.Sealed, r.Task, r.Fence)
}

// Answer answers the requests of other hosts until ctx ends. Give decides about a request, whose host is
// certainly the one that it names, and returns the secrets; the host's certificate says to whom they
// are encrypted.
func (x *Exchange) Answer(ctx context.Context, give func(context.Context, SecretsRequest) ([]byte, error)) error {
	var all sync.WaitGroup
	defer all.Wait()
	slots := slots{all: maxAnswering, each: maxAsking}
	sub, err := x.Conn.Subscribe(seal+x.Host+".*", func(m *nats.Msg) {
		from := lastToken(m.Subject)
		if !slots.take(from) {
			respond(m, nil, fail.New(fail.Host, "it is busy"))
			return
		}
		all.Go(func() {
			defer slots.free(from)
			ctx, cancel := context.WithTimeout(ctx, answerTime)
			defer cancel()
			sealed, err := x.answer(ctx, from, m.Data, give)
			respond(m, sealed, err)
		})
	})
	if err != nil {
		return fmt.Errorf("answer requests for secrets: %w", err)
	}
	<-ctx.Done()
	return sub.Unsubscribe()
}

// respond answers a request. A lost answer is asked for again.
func respond(m *nats.Msg, sealed []byte, err error) {
	a := sealedReply{Sealed: sealed}
	if err != nil {
		a = sealedReply{Code: fail.CodeOf(err).String(), Error: err.Error(), Hint: fail.HintOf(err)}
	}
	if text, err := json.Marshal(a); err == nil {
		_ = answerInbox(m, text)
	}
}

func (x *Exchange) answer(ctx context.Context, from string, text []byte, give func(context.Context, SecretsRequest) ([]byte, error)) ([]byte, error) {
	var s signed
	var r SecretsRequest
	if len(text) > maxQuestion || json.Unmarshal(text, &s) != nil || json.Unmarshal(s.Text, &r) != nil || CheckName(r.Host) != nil || r.Host != from {
		return nil, fail.New(fail.Usage, "the request for secrets is invalid")
	}
	to, err := x.member(ctx, r.Host)
	if err != nil {
		return nil, err
	}
	if err := s.verify(to.Nkey); err != nil {
		return nil, fail.New(fail.Policy, "the request for secrets is not signed by host %s", r.Host)
	}
	secrets, err := give(ctx, r)
	if err != nil {
		return nil, err
	}
	return Seal(to.Recipient, r.Task, r.Fence, secrets)
}

// member returns who a host is, by its certificate. It reads the list of members each time, because a
// host that was removed must get nothing.
func (x *Exchange) member(ctx context.Context, name string) (Identity, error) {
	m, err := x.Members.Get(ctx, name)
	if errors.Is(err, ErrNone) || err == nil && !m.Removed.IsZero() {
		return Identity{}, fail.New(fail.Policy, "host %s is not a member of the cluster", name)
	}
	if err != nil {
		return Identity{}, fail.New(fail.Host, "%w", err)
	}
	cert, err := decodeCertificate([]byte(m.Certificate))
	if err != nil {
		return Identity{}, fail.New(fail.Policy, "the certificate of host %s: %w", name, err)
	}
	root, err := decodeCertificate(x.Authority)
	if err != nil {
		return Identity{}, err
	}
	i, err := identify(cert, root)
	if err == nil && (i.Name != name || i.Nkey != m.Nkey) {
		err = fail.New(fail.Policy, "the certificate of host %s is another one's", name)
	}
	return i, err
}
