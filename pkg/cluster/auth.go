package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// join is the subject at which an invited host asks to be admitted; the public key of its token
// follows.
const join = "join."

// inbox returns the prefix of the subjects at which a host, or a token, receives answers. It contains
// the public key, so that no other host can listen there.
func inbox(nkey string) string { return "_INBOX." + nkey }

// answerInbox answers a request, if who asked receives the answer: otherwise it could send answers, which this
// host may send anywhere, to subjects that it may not use.
func answerInbox(m *nats.Msg, text []byte) error {
	if !strings.HasPrefix(m.Reply, inbox("")) {
		return errors.New("the answer would go to a subject other than an inbox")
	}
	return m.Respond(text)
}

// permissions returns the subjects that a member may use. Without a role that this program knows, there
// are none.
func (m Membership) permissions() *server.Permissions {
	subscribe := []string{inbox(m.Nkey) + ".>", "tunnel." + m.Name + ".>"}
	publish := []string{
		"host." + m.Name, "task.*", "artifact.*.*", "entry.*.*", "tunnel.*.c.*", seal + "*",
		"$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.TASKS", "$JS.API.STREAM.MSG.GET.HOSTS", "$JS.API.STREAM.MSG.GET.MEMBERS", "$JS.API.STREAM.MSG.GET." + entryStream,
		"$JS.API.CONSUMER.CREATE.TASKS.>", "$JS.API.CONSUMER.CREATE.HOSTS.>", "$JS.API.CONSUMER.CREATE.MEMBERS.>",
		"$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.API.CONSUMER.DELETE.*.*", "$JS.API.CONSUMER.LIST.QUEUE", "$JS.API.CONSUMER.INFO.*.*", "$JS.ACK.>", "$JS.FC.>",
	}
	if m.Role.Allows(Member) {
		publish = append(publish, "$JS.API.STREAM.MSG.GET."+fileStream, "queue.*.*", "$JS.API.CONSUMER.CREATE.QUEUE.>", "tunnel.*.open")
		subscribe = append(subscribe, seal+m.Name)
	}
	switch {
	case m.Role.Allows(CoreOf):
		publish, subscribe = []string{">"}, []string{">"}
	case !slices.Contains(Roles(), m.Role):
		publish, subscribe = nil, nil
	}
	return &server.Permissions{
		Publish: allow(publish), Subscribe: allow(subscribe),
		Response: &server.ResponsePermission{MaxMsgs: 1, Expires: time.Minute}, // to openings of tunnels, and to requests for secrets
	}
}

// allow returns the permission for subjects and no others.
func allow(subjects []string) *server.SubjectPermission {
	if len(subjects) == 0 {
		return &server.SubjectPermission{Deny: []string{">"}}
	}
	return &server.SubjectPermission{Allow: subjects}
}

// nkeyUsers returns who may log in to the server.
func nkeyUsers(members []Membership, invitations []Invitation, now time.Time) (users []*server.NkeyUser) {
	for _, m := range members {
		if m.Removed.IsZero() {
			users = append(users, &server.NkeyUser{Nkey: m.Nkey, Permissions: m.permissions()})
		}
	}
	for _, i := range invitations {
		// After its use, for a host whose answer was lost.
		if now.Before(i.Expires) {
			users = append(users, &server.NkeyUser{Nkey: i.Nkey, Permissions: &server.Permissions{
				Publish: allow([]string{join + i.Nkey}), Subscribe: allow([]string{inbox(i.Nkey) + ".>"}),
			}})
		}
	}
	return users
}

// users returns all who may log in to the server: also the core itself, for what only an operator
// of the server may do.
func (c *Core) users(members []Membership, invitations []Invitation) ([]*server.NkeyUser, error) {
	public, err := c.operator.PublicKey()
	if err != nil {
		return nil, err
	}
	operator := &server.NkeyUser{Nkey: public, Account: server.NewAccount(server.DEFAULT_SYSTEM_ACCOUNT)}
	return append(nkeyUsers(members, invitations, time.Now()), operator), nil
}

// Authorize makes the server accept these hosts and tokens and no others. Connections of
// others end.
func (c *Core) Authorize(members []Membership, invitations []Invitation) error {
	c.reload.Lock()
	defer c.reload.Unlock()
	users, err := c.users(members, invitations)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.cores = cores(members)
	c.mu.Unlock()
	var text []byte // of what nkeyUsers depends on
	for _, u := range users[:len(users)-1] {
		text = fmt.Appendf(text, "%s %v\n", u.Nkey, u.Permissions.Publish.Allow)
	}
	if bytes.Equal(text, c.allowed) { // a reload has costs for all connections
		return nil
	}
	o := c.opts.Clone()
	o.Nkeys = users
	if err := c.server.ReloadOptions(o); err != nil {
		return fmt.Errorf("change who may log in to the cluster's server: %w", err)
	}
	c.allowed = text
	return nil
}

// RemoveServer removes a server that has ended, a core or the witness, from the votes of the
// cluster. Its name must not be used again.
func (c *Core) RemoveServer(ctx context.Context, name string) error {
	opts, err := login(c.operator)
	if err != nil {
		return err
	}
	nc, err := c.connect(opts...)
	if err != nil {
		return fmt.Errorf("remove server %s from the cluster: %w", name, err)
	}
	defer nc.Close()
	// JSApiMetaServerRemoveRequest and its response, in jetstream_api.go of the server.
	text, err := json.Marshal(map[string]string{"peer": name})
	if err != nil {
		return err
	}
	m, err := nc.RequestWithContext(ctx, server.JSApiRemoveServer, text)
	var answer struct {
		Success bool             `json:"success"`
		Error   *server.ApiError `json:"error"`
	}
	if err == nil {
		err = json.Unmarshal(m.Data, &answer)
	}
	switch {
	case err != nil:
		return fmt.Errorf("remove server %s from the cluster: %w", name, err)
	case answer.Error != nil && answer.Error.ErrCode == uint16(server.JSClusterServerNotMemberErr):
		return nil // it was removed before
	case !answer.Success:
		return fmt.Errorf("remove server %s from the cluster: %w", name, answer.Error)
	}
	return nil
}

// cores returns the keys of the hosts that may run servers.
func cores(members []Membership) map[string]bool {
	all := map[string]bool{}
	for _, m := range members {
		if m.Removed.IsZero() && m.Role.Allows(CoreOf) {
			all[m.Nkey] = true
		}
	}
	return all
}

// Login returns what a host needs to log in to the cluster's servers. authority is the certificate that
// they are trusted by, as PEM.
func (k *Keys) Login(authority []byte) ([]nats.Option, error) {
	f, err := Fingerprint(authority)
	if err != nil {
		return nil, err
	}
	opts, err := login(k.nkey)
	return append(opts, nats.Secure(pinned(f))), err
}

func login(key nkeys.KeyPair) ([]nats.Option, error) {
	public, err := key.PublicKey()
	if err != nil {
		return nil, err
	}
	return []nats.Option{nats.Nkey(public, key.Sign), nats.CustomInboxPrefix(inbox(public))}, nil
}
