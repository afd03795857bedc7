import pytest

from resilin.cli.live.access import Access, access, given_secret


def test_a_url_names_the_endpoints():
    assert access("etcd://one", {}) == Access(endpoints=(("one", 2379),))
    several = access("etcds://one:1,two,[::1]:3/", {})
    assert several.endpoints == (("one", 1), ("two", 2379), ("::1", 3))
    assert several.tls
    assert str(several) == "etcds://one:1,two:2379,[::1]:3"


@pytest.mark.parametrize("url", ["one:2379", "http://one", "etcd://", "etcd://one/x", "etcd://a:b"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"must be (etcd://)?HOST:PORT"):
        access(url, {})


@pytest.mark.parametrize("url", ["etcd://me:pa55@one:2379", "etcds://me@one", "http://me:pa55@one"])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match="must") as raised:
        access(url, {})
    assert "pa55" not in str(raised.value)
    if url.startswith("etcd"):
        assert "Set ETCDCTL_USER and ETCDCTL_PASSWORD" in str(raised.value)


def test_the_user_comes_from_the_environment(tmp_path):
    given = access("etcd://one", {"ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": "pa55"})
    assert (given.user, given.password) == ("me", "pa55")
    assert "pa55" not in repr(given)
    short = access("etcd://one", {"ETCDCTL_USER": "me:pa:55"})
    assert (short.user, short.password) == ("me", "pa:55")
    file = tmp_path / "password"
    file.write_text("pa55\n")
    file.chmod(0o600)
    named = {"ETCDCTL_USER": "me", "RESILIN_ETCD_PASSWORD_FILE": str(file)}
    assert access("etcd://one", named).password == "pa55"
    with pytest.raises(ValueError, match="must not both be set"):
        access("etcd://one", named | {"ETCDCTL_PASSWORD": "other"})
    for half in ({"ETCDCTL_USER": "me"}, {"ETCDCTL_PASSWORD": "pa55"}):
        with pytest.raises(ValueError, match="must both be set, or none"):
            access("etcd://one", half)
    file.chmod(0o640)
    with pytest.raises(ValueError, match="readable by its owner alone"):
        access("etcd://one", named)


def test_certificates_are_for_tls_alone(tmp_path):
    files = {"ETCDCTL_CACERT": "ca", "ETCDCTL_CERT": "cert", "ETCDCTL_KEY": "key"}
    given = access("etcds://one", files)
    assert (given.ca, given.certificate, given.key) == ("ca", "cert", "key")
    with pytest.raises(ValueError, match="no certificates from ca, cert, key"):
        given.context()
    with pytest.raises(ValueError, match="only etcds:// has TLS"):
        access("etcd://one", files)
    with pytest.raises(ValueError, match="ETCDCTL_CERT and ETCDCTL_KEY must both be set"):
        access("etcds://one", {"ETCDCTL_CERT": "cert"})
    assert access("etcd://one", {}).context() is None


def test_a_secret_must_be_private_and_long(tmp_path):
    assert given_secret({}) is None
    file = tmp_path / "secret"
    known = {"RESILIN_SECRET_FILE": str(file)}
    with pytest.raises(ValueError, match="cannot be read"):
        given_secret(known)
    file.write_text("0123456789abcdef\n")
    with pytest.raises(ValueError, match="readable by its owner alone"):
        given_secret(known)
    file.chmod(0o600)
    assert given_secret(known) == b"0123456789abcdef"
    file.write_text("short")
    with pytest.raises(ValueError, match="has 5 bytes and must have at least 16"):
        given_secret(known)
