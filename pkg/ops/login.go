package ops

import (
	"context"
	"net/http"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// LoginRequest asks for a certificate for the client's key.
type LoginRequest struct {
	SessionPath
	Body struct {
		PublicKey string `json:"public_key" maxLength:"1024" doc:"An ed25519 key, in authorized_keys format." example:"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ+cSFdCrF0rLFtdxTdpHR2DPjPBTYXZfJoTJ7gvRPAL"`
	}
}

// LoginSession lets the owner of a key log in to a guest through Tunnel.
var LoginSession = Operation[LoginRequest, session.GuestLogin]{Spec{
	ID: "loginSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/login", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
	Summary: "Certify a key for logins to a session's guest",
	About: "The certificate is valid for 24 hours, and only for the guest's user. It permits terminals and forwarded ports. With it, the client logs in " +
		"through tunnelSession. The client should make a new key for this, and keep it in memory only.",
}, func(ctx context.Context, e *Engine, r *LoginRequest) (l session.GuestLogin, err error) {
	s, err := e.Reachable(ctx, r.ID)
	if err != nil {
		return l, err
	}
	if l, err = (session.Connections{Paths: e.sessions().Config.Paths}).Certify(s, r.Body.PublicKey); err != nil {
		return l, err
	}
	e.audit(ctx, audit.Record{
		Type: audit.LoginCertified, Actor: e.Caller.Name, Resource: "session:" + s.ID, Outcome: audit.Success,
		Details: map[string]any{"expires": l.Expires},
	})
	return l, nil
}}
