package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
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
// are none. requests precedes those of requests for JetStream.
func (m Membership) permissions(requests string) *server.Permissions {
	subscribe := []string{inbox(m.Nkey) + ".>", "tunnel." + m.Name + ".>"}
	publish := []string{
		"host." + m.Name, "task.*", "artifact.*.*", "entry.*.*", "tunnel.*.c.*", seal + "*." + m.Name,
		"$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.TASKS", "$JS.API.STREAM.MSG.GET.HOSTS", "$JS.API.STREAM.MSG.GET.MEMBERS", "$JS.API.STREAM.MSG.GET." + entryStream,
		"$JS.API.CONSUMER.CREATE.TASKS.>", "$JS.API.CONSUMER.CREATE.HOSTS.>", "$JS.API.CONSUMER.CREATE.MEMBERS.>",
		"$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.API.CONSUMER.DELETE.*.*", "$JS.API.CONSUMER.LIST.QUEUE", "$JS.API.CONSUMER.INFO.*.*", "$JS.ACK.>", "$JS.FC.>",
	}
	if m.Role.Allows(Member) {
		publish = append(publish, "$JS.API.STREAM.MSG.GET."+fileStream, "queue.*.*", "$JS.API.CONSUMER.CREATE.QUEUE.>", "tunnel.*.open."+m.Name)
		subscribe = append(subscribe, seal+m.Name+".*")
	}
	for i, subject := range publish {
		if rest, ok := strings.CutPrefix(subject, ownRequests); ok {
			publish[i] = requests + rest
		}
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

// nkeyUsers returns who may log in to the server. requests precedes the subjects of requests for JetStream.
func nkeyUsers(members []Membership, invitations []Invitation, now time.Time, requests string) (users []*server.NkeyUser) {
	for _, m := range members {
		if m.Removed.IsZero() {
			users = append(users, &server.NkeyUser{Nkey: m.Nkey, Permissions: m.permissions(requests)})
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

// logins decides who may log in to a server. The server has a list of its own, which changes only by a
// reload of its options: that turns away hosts that are logging in at that moment.
type logins struct {
	mu    sync.Mutex // held until a login is complete, so that a change of users sees it
	users map[string]*server.NkeyUser
}

// set changes who may log in, and returns those whose connections must end: they may no longer log in, or
// may use other subjects.
func (l *logins) set(users []*server.NkeyUser) (changed map[string]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed = map[string]bool{}
	for key := range l.users {
		changed[key] = true
	}
	before := l.users
	l.users = map[string]*server.NkeyUser{}
	for _, u := range users {
		if b := before[u.Nkey]; b != nil && reflect.DeepEqual(b.Permissions, u.Permissions) {
			delete(changed, u.Nkey)
		}
		l.users[u.Nkey] = u
	}
	return changed
}

// Check decides about a connection, which has signed the server's nonce with its key.
func (l *logins) Check(a server.ClientAuthentication) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := a.GetOpts()
	user := l.users[o.Nkey]
	client, ok := a.(interface {
		RegisterNkeyUser(user *server.NkeyUser) error
	})
	if user == nil || !ok {
		return false
	}
	key, err := nkeys.FromPublicKey(o.Nkey)
	if err != nil {
		return false
	}
	signature, err := base64.RawURLEncoding.DecodeString(o.Sig)
	if err != nil {
		return false
	}
	return key.Verify(a.GetNonce(), signature) == nil && client.RegisterNkeyUser(user) == nil
}

// Authorize makes the server accept these hosts and tokens and no others. Connections of
// others end, and those of hosts whose role changed.
func (c *Core) Authorize(members []Membership, invitations []Invitation) error {
	public, err := c.operator.PublicKey()
	if err != nil {
		return err
	}
	operator := &server.NkeyUser{Nkey: public, Account: c.server.Load().SystemAccount()}
	changed := c.logins.set(append(nkeyUsers(members, invitations, time.Now(), c.requests), operator))
	return errors.Join(c.disconnect(changed), c.setCores(members))
}

// disconnect ends the connections of hosts and tokens.
func (c *Core) disconnect(keys map[string]bool) error {
	if len(keys) == 0 {
		return nil
	}
	open, err := c.server.Load().Connz(&server.ConnzOptions{Username: true, Limit: math.MaxInt32})
	if err != nil {
		return fmt.Errorf("end the connections of removed hosts: %w", err)
	}
	for _, conn := range open.Conns {
		if keys[conn.AuthorizedUser] {
			_ = c.server.Load().DisconnectClientByID(conn.Cid) // its only error: the connection has ended
		}
	}
	return nil
}

// RemoveServer removes a server that has ended, a core or the witness, from the votes of the
// cluster. Its name must not be used again.
func (c *Core) RemoveServer(ctx context.Context, name string) error {
	if c.external() { // it has no votes
		return nil
	}
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

// setCores changes which servers may be connected to this one, and ends the connections to others, also those
// that this server opened. Connections that others had begun end with a later call, once they are complete.
func (c *Core) setCores(members []Membership) error {
	if c.external() { // it has no connections to other cores
		return nil
	}
	c.reload.Lock()
	defer c.reload.Unlock()
	now := cores(members)
	c.mu.Lock()
	for key := range c.cores {
		if !now[key] {
			c.gone = time.Now().Add(connectTimeout)
		}
	}
	c.cores = now // new connections are checked against these
	c.mu.Unlock()
	if c.gone.IsZero() {
		return nil
	}
	last := time.Now().After(c.gone)
	// A reload may turn away a host that is logging in, which tries again.
	o := c.opts.Clone()
	o.Cluster.TLSPinnedCerts = pins(members)
	if err := errors.Join(c.server.Load().ReloadOptions(o), c.server.Load().ReloadOptions(c.opts.Clone())); err != nil {
		return fmt.Errorf("end the connections to removed cores: %w", err)
	}
	if last {
		c.gone = time.Time{}
	}
	return nil
}

// pins returns the keys of the certificates of the hosts that may run servers.
func pins(members []Membership) server.PinnedCertSet {
	all := server.PinnedCertSet{}
	for _, m := range members {
		if cert, err := decodeCertificate([]byte(m.Certificate)); err == nil && m.Removed.IsZero() && m.Role.Allows(CoreOf) {
			all[fmt.Sprintf("%x", sha256.Sum256(cert.RawSubjectPublicKeyInfo))] = struct{}{}
		}
	}
	return all
}

// Login returns what a host needs to log in to the cluster's servers. authority is the certificate that
// they are trusted by, as PEM.
func (k *Keys) Login(authority []byte) ([]nats.Option, error) {
	return k.loginTo(authority, func(Identity) error { return nil })
}

// loginTo does what Login does. trust decides about a core.
func (k *Keys) loginTo(authority []byte, trust func(Identity) error) ([]nats.Option, error) {
	f, err := Fingerprint(authority)
	if err != nil {
		return nil, err
	}
	opts, err := login(k.nkey)
	return append(opts, nats.Secure(pinned(f, trust))), err
}

func login(key nkeys.KeyPair) ([]nats.Option, error) {
	public, err := key.PublicKey()
	if err != nil {
		return nil, err
	}
	return []nats.Option{nats.Nkey(public, key.Sign), nats.CustomInboxPrefix(inbox(public))}, nil
}
