package ops

import (
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// HostsPath is the path below which a host has the API of each other host of its cluster:
// HostsPath/NAME/api/v1/sessions. Only the host's own user can reach it.
const HostsPath = "/hosts"

// peerTags are the groups of operations that another host may ask for. The others maintain this
// host or its cluster, or show its secrets.
var peerTags = []string{"sessions", "tasks", "questions", "network", "usage", "recordings"}

// Peer returns the caller for what comes from another host of the cluster. It may work with all
// sessions and tasks, and with nothing else of this host.
func Peer(host string) Caller { return Caller{Name: "host:" + host, Scope: Admin, Peer: true} }

// checkPeer refuses operations that are not for other hosts.
func (c Caller) checkPeer(s Spec) error {
	if !c.Peer || slices.Contains(peerTags, s.Tag) {
		return nil
	}
	return marked{fail.New(fail.Policy, "%s is not for other hosts of the cluster", s.ID).WithHint("run it on the host itself"), ErrScope}
}

// checkSession refuses what only this host's own user may give to a session: files of the host, services
// of its network, and the secrets and rules of its profiles.
func (c Caller) checkSession(repository string, o SessionOptions) error {
	refuse := func(what, hint string) error {
		return fail.New(fail.Policy, "%s is not for other hosts of the cluster", what).WithHint("%s", hint)
	}
	switch {
	case !c.Peer:
	case strings.HasPrefix(repository, "/"), strings.HasPrefix(repository, "file:"):
		return refuse("a directory of this host", "agent-sessionizer open owner/repo")
	case strings.Contains(o.Image, "/"):
		return refuse("an image that is not named", "agent-sessionizer image list # on the host itself")
	case o.Profile != "":
		return refuse("a profile of this host", "run it on the host itself")
	case o.Workspace != "" || o.Trust:
		return refuse("a workspace of this host", "run it on the host itself")
	case len(o.HostServices) > 0:
		return refuse("a service of this host", "run it on the host itself")
	}
	return nil
}

// submitPermission returns which tasks the caller may submit; nil for all.
func (c Caller) submitPermission() *task.Permission {
	if c.Peer {
		return &task.Permission{Repositories: []string{task.AnyRepository}}
	}
	return c.Permission
}
