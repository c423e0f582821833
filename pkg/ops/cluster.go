package ops

import (
	"context"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
)

// ClusterPath is the path below which the API has the hosts of the cluster.
const ClusterPath = "/api/v1/cluster"

// ClusterHosts are the hosts of the cluster.
type ClusterHosts struct {
	Cluster string           `json:"cluster" doc:"The name of the cluster."`
	Host    string           `json:"host" doc:"The name of the host that answers."`
	Hosts   []fleet.HostView `json:"hosts" nullable:"false"`
}

// Requests for operations on the cluster.
type (
	ClusterHostPath struct {
		Name string `path:"name" maxLength:"63" doc:"The name of the host in the cluster."`
	}
	InviteRequest struct {
		Body struct {
			Role  cluster.Role `json:"role" enum:"worker,member,core" doc:"worker: runs tasks. member: also submits tasks. core: also holds what the cluster remembers."`
			Valid string       `json:"valid,omitempty" doc:"How long the token can be used, such as 1h. Default: 1h; at most 168h." example:"1h"`
		}
	}
	DrainRequest struct {
		ClusterHostPath
		Body struct {
			Drained bool `json:"drained" doc:"Whether the host takes no more tasks."`
		}
	}
)

// JoinToken admits one host to the cluster.
type JoinToken struct {
	Token     string    `json:"token" doc:"It is a secret until it has been used."`
	ExpiresAt time.Time `json:"expires_at"`
}

// defaultInvitation is how long a token is valid if its creator does not say it.
const defaultInvitation = time.Hour

// part returns this host's part in its cluster.
func (e *Engine) part() (*fleet.Part, error) {
	if e.Cluster == nil {
		return nil, fail.New(fail.Conflict, "this host belongs to no cluster").WithHint("agent-sessionizer serve --help # --cluster and --join")
	}
	return e.Cluster, nil
}

// Operations on the cluster.
var (
	ListClusterHosts = Operation[struct{}, ClusterHosts]{Spec{
		ID: "listClusterHosts", Method: http.MethodGet, Path: ClusterPath + "/hosts", Tag: "cluster", Need: Read, Errors: []int{409},
		Summary: "List the hosts of the cluster",
	}, func(ctx context.Context, e *Engine, _ *struct{}) (list ClusterHosts, err error) {
		p, err := e.part()
		if err != nil {
			return list, err
		}
		list.Cluster, list.Host = p.State.Cluster, p.State.Name
		list.Hosts, err = p.Hosts(ctx)
		return list, err
	}}

	InviteHost = Operation[InviteRequest, JoinToken]{Spec{
		ID: "inviteHost", Method: http.MethodPost, Path: ClusterPath + "/tokens", Tag: "cluster", Need: Admin, Errors: []int{409},
		Summary: "Create a token with which one host can join the cluster",
	}, func(ctx context.Context, e *Engine, r *InviteRequest) (JoinToken, error) {
		p, err := e.part()
		if err != nil {
			return JoinToken{}, err
		}
		valid := defaultInvitation
		if r.Body.Valid != "" {
			if valid, err = time.ParseDuration(r.Body.Valid); err != nil {
				return JoinToken{}, fail.New(fail.Usage, "valid must be a duration such as 1h: %w", err).WithHint("agent-sessionizer cluster token --valid 1h")
			}
		}
		t, err := p.Invite(ctx, r.Body.Role, valid)
		if err != nil {
			return JoinToken{}, err
		}
		e.audit(ctx, audit.Record{Type: audit.HostInvited, Actor: e.Caller.Name, Resource: "cluster:" + p.State.Cluster, Outcome: audit.Success, Details: map[string]any{"role": r.Body.Role}})
		return JoinToken{t.String(), time.Now().Add(valid).UTC().Truncate(time.Second)}, nil
	}}

	DrainHost = Operation[DrainRequest, fleet.HostView]{Spec{
		ID: "drainHost", Method: http.MethodPost, Path: ClusterPath + "/hosts/{name}/drain", Tag: "cluster", Need: Admin, Errors: []int{404, 409},
		Summary: "Let a host take no more tasks, or take tasks again",
		About:   "The tasks that it has continue.",
	}, func(ctx context.Context, e *Engine, r *DrainRequest) (fleet.HostView, error) {
		p, err := e.part()
		if err != nil {
			return fleet.HostView{}, err
		}
		v, err := p.Drain(ctx, r.Name, r.Body.Drained)
		if err == nil {
			e.audit(ctx, audit.Record{Type: audit.HostDrained, Actor: e.Caller.Name, Resource: "host:" + r.Name, Outcome: audit.Success, Details: map[string]any{"drained": r.Body.Drained}})
		}
		return v, err
	}}

	RemoveHost = Operation[ClusterHostPath, fleet.HostView]{Spec{
		ID: "removeHost", Method: http.MethodDelete, Path: ClusterPath + "/hosts/{name}", Tag: "cluster", Need: Admin, Errors: []int{404, 409},
		Summary: "Remove a host from the cluster for good",
		About:   "Its keys are refused from then on, and its tasks are released once its lease has certainly ended, after 90 seconds: they run again elsewhere where their manifests allow it. Its name is never used again.",
	}, func(ctx context.Context, e *Engine, r *ClusterHostPath) (fleet.HostView, error) {
		p, err := e.part()
		if err != nil {
			return fleet.HostView{}, err
		}
		v, err := p.Remove(ctx, r.Name)
		if err == nil {
			e.audit(ctx, audit.Record{Type: audit.HostRemoved, Actor: e.Caller.Name, Resource: "host:" + r.Name, Outcome: audit.Success})
		}
		return v, err
	}}
)
