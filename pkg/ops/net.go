package ops

import (
	"context"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Network is what a session may reach, and the process that enforces it.
type Network struct {
	Policy   *policy.Policy  `json:"policy"`
	Enforced bool            `json:"enforced" doc:"The VM's only network card ends in a gateway on the host."`
	Gateway  *gateway.Status `json:"gateway,omitempty" doc:"Absent while no gateway runs."`

	GatewayError string `json:"gateway_error,omitempty" doc:"Why no gateway answers."`
}

// Explanation is the policy's decision about a name or address.
type Explanation struct {
	Host    string `json:"host"`
	Port    uint16 `json:"port,omitempty"`
	Allowed bool   `json:"allowed"`
	Rule    string `json:"rule,omitempty"`
	Source  string `json:"source,omitempty"`
	Reason  string `json:"reason"`
	Request string `json:"request,omitempty" doc:"The request that the decision is about."`
}

// Explanations holds the decision about a name, and about each port if the name is allowed.
type Explanations struct {
	Decisions []Explanation `json:"decisions" nullable:"false"`
	Name      bool          `json:"name" doc:"The target is a name, not an address."`
	Mode      policy.Mode   `json:"mode" doc:"Mode of the session's network."`
}

// DenialList lists denials by target.
type DenialList struct {
	Denials []gateway.Denial `json:"denials" nullable:"false"`
}

// DecisionList lists the gateway's decisions, oldest first.
type DecisionList struct {
	Decisions []gateway.Entry `json:"decisions" nullable:"false"`
}

// Requests for operations on the network of a session.
type (
	NamesRequest struct {
		SessionPath
		Body struct {
			Names []string `json:"names" minItems:"1" maxItems:"256" nullable:"false" doc:"Names with an optional port, @groups, or requests as METHODS URL." example:"[\"files.example.org\", \"@pypi\"]"`
		}
	}
	ExplainRequest struct {
		SessionPath
		Target string `query:"target" required:"true" maxLength:"4096" doc:"HOST[:PORT], ADDRESS[:PORT], or METHOD URL." example:"github.com:443"`
	}
	DenialQuery struct {
		SessionPath
		Since time.Time `query:"since" doc:"Only denials after this time."`
	}
	DecisionQuery struct {
		SessionPath
		Limit int `query:"limit" default:"1000" minimum:"1" maximum:"10000" doc:"Number of the latest decisions."`
	}
)

const netPath = SessionsPath + "/{id}/net"

// Operations on the network of a session.
var (
	GetNetwork = Operation[SessionPath, Network]{Spec{
		ID: "getNetwork", Method: http.MethodGet, Path: netPath, Tag: "network", Need: Read, Errors: []int{404},
		Summary: "Get what a session may reach, and its gateway's status",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (n Network, err error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return n, err
		}
		n.Enforced = s.Spec.Enforced
		if n.Policy, err = (session.Net{Sessions: e.sessions()}).Policy(ctx, s); err != nil || !n.Enforced {
			return n, err
		}
		if g, err := e.sessions().Gateway(s).Status(ctx); err != nil {
			n.GatewayError = err.Error()
		} else {
			n.Gateway = &g
		}
		return n, nil
	}}

	AllowNames = Operation[NamesRequest, session.View]{Spec{
		ID: "allowNames", Method: http.MethodPost, Path: netPath + "/allow", Tag: "network", Need: Admin, Errors: []int{404, 409},
		Summary: "Allow names or @groups in a session immediately",
	}, func(ctx context.Context, e *Engine, r *NamesRequest) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Net{Sessions: e.sessions()}.Allow(ctx, s, r.Body.Names)
		})
	}}

	DenyNames = Operation[NamesRequest, session.View]{Spec{
		ID: "denyNames", Method: http.MethodPost, Path: netPath + "/deny", Tag: "network", Need: Admin, Errors: []int{404, 409},
		Summary: "Deny names in a session immediately, even if allowed",
	}, func(ctx context.Context, e *Engine, r *NamesRequest) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Net{Sessions: e.sessions()}.Deny(ctx, s, r.Body.Names)
		})
	}}

	ReloadNetwork = Operation[SessionPath, session.View]{Spec{
		ID: "reloadNetwork", Method: http.MethodPost, Path: netPath + "/reload", Tag: "network", Need: Admin, Errors: []int{404, 409},
		Summary: "Reload network settings into a running session",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (session.View, error) {
		s, err := e.ready(ctx, r.ID)
		if err == nil {
			err = session.Net{Sessions: e.sessions()}.ApplyPolicy(ctx, s)
		}
		return s.View(), err
	}}

	ExplainName = Operation[ExplainRequest, Explanations]{Spec{
		ID: "explainName", Method: http.MethodGet, Path: netPath + "/explain", Tag: "network", Need: Read, Errors: []int{404},
		Summary: "Explain whether a session may reach a name or address",
	}, func(ctx context.Context, e *Engine, r *ExplainRequest) (Explanations, error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return Explanations{}, err
		}
		return e.explain(ctx, s, r.Target)
	}}

	ListDenials = Operation[DenialQuery, DenialList]{Spec{
		ID: "listDenials", Method: http.MethodGet, Path: netPath + "/denials", Tag: "network", Need: Read, Errors: []int{404},
		Summary: "List what the gateway denied, and how often",
	}, func(ctx context.Context, e *Engine, r *DenialQuery) (DenialList, error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return DenialList{}, err
		}
		done, err := e.costly()
		if err != nil {
			return DenialList{}, err
		}
		defer done()
		found, err := session.Net{Sessions: e.sessions()}.DeniedSince(ctx, s, r.Since)
		return DenialList{append([]gateway.Denial{}, found...)}, err
	}}

	ListDecisions = Operation[DecisionQuery, DecisionList]{Spec{
		ID: "listDecisions", Method: http.MethodGet, Path: netPath + "/decisions", Tag: "network", Need: Read, Errors: []int{404},
		Summary: "List the latest decisions of the gateway",
	}, func(ctx context.Context, e *Engine, r *DecisionQuery) (list DecisionList, err error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return list, err
		}
		done, err := e.costly()
		if err != nil {
			return list, err
		}
		defer done()
		list.Decisions = []gateway.Entry{}
		for d, err := range gateway.Decisions(ctx, e.sessions().Gateway(s).Dir, false) {
			if err != nil {
				return list, err
			}
			list.Decisions = append(list.Decisions, d)
		}
		list.Decisions = list.Decisions[max(0, len(list.Decisions)-r.Limit):]
		return list, nil
	}}
)

func (e *Engine) explain(ctx context.Context, s session.Session, target string) (found Explanations, err error) {
	p, err := session.Net{Sessions: e.sessions()}.Policy(ctx, s)
	if err != nil {
		return found, err
	}
	if policy.IsRequest(target) {
		return explainRequest(p, target)
	}
	q, err := question(target)
	if err != nil {
		return found, err
	}
	found.Mode, found.Name = p.Mode, q.Name != ""
	host := q.Name
	if host == "" {
		host = q.Addr.String()
	}
	add := func(q policy.Question) {
		d := p.Decide(q)
		found.Decisions = append(found.Decisions, Explanation{host, q.Port, d.Allowed, d.Rule, d.Source, d.Reason, ""})
	}
	if add(q); q.Name != "" && q.Port == 0 && found.Decisions[0].Allowed {
		for _, port := range p.PortsOut() {
			add(policy.Question{Name: q.Name, Port: port})
		}
	}
	return found, nil
}

// explainRequest explains the decisions about the host of a request, and about the request.
func explainRequest(p *policy.Policy, target string) (found Explanations, err error) {
	r, err := policy.ParseRequest(target)
	if err != nil {
		return found, fail.New(fail.Usage, "target %w", err)
	}
	found.Mode, found.Name = p.Mode, true
	const https = 443
	if d := p.Decide(policy.Question{Name: r.Host, Port: https}); !d.Allowed {
		found.Decisions = []Explanation{{r.Host, https, d.Allowed, d.Rule, d.Source, d.Reason, ""}}
		return found, nil
	}
	d := p.DecideRequest(r)
	found.Decisions = []Explanation{{r.Host, https, d.Allowed, d.Rule, d.Source, d.Reason, r.String()}}
	return found, nil
}

// question parses HOST, HOST:PORT, ADDRESS:PORT or [ADDRESS]:PORT.
func question(target string) (policy.Question, error) {
	if ap, err := netip.ParseAddrPort(target); err == nil {
		return policy.Question{Addr: ap.Addr(), Port: ap.Port()}, nil
	}
	if addr, err := netip.ParseAddr(target); err == nil {
		return policy.Question{Addr: addr, Port: 443}, nil
	}
	if strings.Contains(target, "://") {
		return policy.Question{}, fail.New(fail.Usage, "target must be a host name, got URL %q", target)
	}
	name, portText, hasPort := strings.Cut(target, ":")
	canonical, err := policy.Canonical(name)
	if err != nil {
		return policy.Question{}, fail.New(fail.Usage, "target must be HOST[:PORT] or ADDRESS:PORT, got %q", target)
	}
	q := policy.Question{Name: canonical}
	if hasPort {
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil || port == 0 {
			return policy.Question{}, fail.New(fail.Usage, "port must be 1 to 65535, got %q", portText)
		}
		q.Port = uint16(port)
	}
	return q, nil
}
